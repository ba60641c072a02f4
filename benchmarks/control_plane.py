"""What it costs to bring a step to all ranks and an answer back from each: our links beside other carriers.

    python -m benchmarks.control_plane [--vllm-python P] [--ray-python P] [--iceoryx2-python P] [--quick]
                                       [--markdown docs/performance.md]

A step of 2 KB (a prompt of 560 tokens enters, 23 rows get a block) goes to 1, 2 and 4 workers; each answers with 32
tokens. Encoding and decoding are included, the same values travel with every carrier. Three rhythms: back to back,
20 ms before each round trip (a real step), and after 1.5 s of rest. All carriers are started, then measured in turn,
round after round; a figure is the median of the rounds' p50 (or p99), with the lowest and highest. Then CPU time of the
workers: at rest, and in the first second after work.

vLLM: its MessageQueue as its executor uses it. Ray: actor calls. iceoryx2: publish and subscribe with an event, our
msgpack. Pipe and pyzmq (PUSH and PULL over ipc): our msgpack.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import machine, proc, report
from benchmarks.peers import round_trips
from planaria.executor.link.address import Address, open_port
from planaria.executor.link.codec import answer, decode_command, encode_command, read_reply
from planaria.executor.link.faults import LinkClosed, RankPort
from planaria.executor.link.shm import ShmLink
from planaria.executor.link.tcp import TcpLink
from planaria.protocol import StepPlan, StepResult

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "benchmarks" / "out" / "control_plane.json"
WORKERS = (1, 2, 4)
RHYTHMS = {  # name: seconds before each round trip, round trips of one round
    "back to back": (0.0, 1000),
    "20 ms between": (0.02, 25),
    "after 1.5 s": (1.5, 2),
}
LIMIT = 60.0
Trip = Callable[[], None]
PLAN = msgspec.convert(["step", *round_trips.step()], StepPlan, dec_hook=lambda kind, value: array("i", value))
RESULT = msgspec.convert(["step_result", *round_trips.result()], StepResult)


# -- carriers of this process. Each: (one round trip, close)


def rank_main() -> None:
    """A worker of one of our links, whose address comes through standard input."""
    answer_all(open_port(msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Address)))


def answer_all(port: RankPort) -> None:
    """Until the link ends."""
    try:
        while (got := port.receive(None)) is not None:
            port.reply(got[0], RESULT)
    except LinkClosed:
        port.close()


def linked(kind: str, workers: int) -> tuple[Trip, Trip]:
    link: ShmLink | TcpLink = ShmLink(workers) if kind == "shm" else TcpLink(workers)
    processes = []
    for rank in range(workers):
        command = [sys.executable, "-m", "benchmarks.control_plane", "--rank"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(link.address_of(rank)))
        process.stdin.close()
        processes.append(process)

    def close() -> None:
        link.close()
        for process in processes:
            process.wait(LIMIT)

    return over(link), close


def over(link: ShmLink | TcpLink) -> Trip:
    number = 0

    def trip() -> None:
        nonlocal number
        number += 1
        link.send(number, PLAN)
        for _ in range(link.num_ranks):
            got = link.receive(LIMIT)
            assert got is not None and got[1] == number

    return trip


def ray_linked(workers: int) -> tuple[Trip, Trip]:
    """The shm link to Ray actors of this node: what `--ray-link queue` uses there."""
    import ray

    ray.init(address="local", num_cpus=workers + 1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")

    class Rank:
        def run(self, address: bytes) -> None:
            from benchmarks import control_plane

            control_plane.answer_all(open_port(msgspec.msgpack.decode(address, type=Address)))

    kind: Any = ray.remote(num_cpus=0)(Rank)
    link = ShmLink(workers)
    actors = [kind.remote() for _ in range(workers)]
    runs = [actor.run.remote(msgspec.msgpack.encode(link.address_of(rank))) for rank, actor in enumerate(actors)]

    def close() -> None:
        link.close()
        ray.get(runs, timeout=LIMIT)
        ray.shutdown()

    return over(link), close


def pipe_worker(connection: Any) -> None:
    while data := connection.recv_bytes():
        decode_command(data)
        connection.send_bytes(answer(0, RESULT))


def pipe(workers: int) -> tuple[Trip, Trip]:
    spawn = multiprocessing.get_context("spawn")
    ends, processes = [], []
    for _ in range(workers):
        own, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=pipe_worker, args=(theirs,)))
        processes[-1].start()
        ends.append(own)

    def trip() -> None:
        data = encode_command(PLAN)
        for end in ends:
            end.send_bytes(data)
        for end in ends:
            read_reply(end.recv_bytes())

    def close() -> None:
        for end in ends:
            end.send_bytes(b"")
        for process in processes:
            process.join(LIMIT)

    return trip, close


def zmq_worker(folder: str, rank: int) -> None:
    import zmq

    context = zmq.Context()
    pull, push = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    pull.connect(f"ipc://{folder}/{rank}")
    push.connect(f"ipc://{folder}/back")
    while data := pull.recv():
        decode_command(data)
        push.send(answer(0, RESULT))


def pyzmq(workers: int) -> tuple[Trip, Trip]:
    import zmq

    spawn, folder, context = multiprocessing.get_context("spawn"), tempfile.TemporaryDirectory(), zmq.Context()
    back = context.socket(zmq.PULL)
    back.bind(f"ipc://{folder.name}/back")
    outs, processes = [], []
    for rank in range(workers):
        outs.append(context.socket(zmq.PUSH))
        outs[-1].bind(f"ipc://{folder.name}/{rank}")
        processes.append(spawn.Process(target=zmq_worker, args=(folder.name, rank)))
        processes[-1].start()

    def trip() -> None:
        data = encode_command(PLAN)
        for out in outs:
            out.send(data)
        for _ in range(workers):
            read_reply(back.recv())

    def close() -> None:
        for out in outs:
            out.send(b"")
        for process in processes:
            process.join(LIMIT)
        context.destroy(0)
        folder.cleanup()

    return trip, close


OURS: dict[str, Callable[[int], tuple[Trip, Trip]]] = {
    "shm": lambda workers: linked("shm", workers),
    "tcp": lambda workers: linked("tcp", workers),
    "ray-link": ray_linked,
    "pipe": pipe,
    "pyzmq": pyzmq,
}
TITLES = {
    "shm": "planaria, shm link", "ray-link": "planaria, shm link to Ray actors",
    "tcp": "planaria, tcp link (encrypted)", "pipe": "multiprocessing Pipe",
    "pyzmq": "pyzmq PUSH/PULL, ipc", "vllm": "vLLM MessageQueue", "ray": "Ray actor call", "iceoryx2": "iceoryx2",
}  # fmt: skip


# -- measuring


class Carrier:
    """A process that makes round trips when asked."""

    def __init__(self, name: str, workers: int, python: str) -> None:
        self.name = name
        if name in OURS:
            command = [python, "-m", "benchmarks.control_plane", "--carrier", name, str(workers)]
        else:
            command = [python, str(ROOT / "benchmarks" / "peers" / "carriers.py"), name, str(workers)]
        quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # it lives as long as the process
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True, cwd=ROOT,
            env={**os.environ, **quiet, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def hear(self) -> dict[str, Any]:
        """Its next answer. Raises RuntimeError when it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.name} ended: {self.log.read()[-2000:]}")
        said: dict[str, Any] = json.loads(line)
        return said

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def times(self, rhythm: str, scale: float) -> list[float]:
        gap, count = RHYTHMS[rhythm]
        times: list[float] = self.ask(do="run", count=max(1, round(count * scale)), gap=gap)["us"]
        return times

    def cpu(self) -> float:
        """CPU seconds of its workers (and helpers) so far."""
        return proc.cpu_seconds(self.process.pid)

    def close(self) -> None:
        self.ask(do="exit")
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


def percentile(times: list[float], share: float) -> float:
    ordered = sorted(times)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def measure(pythons: dict[str, str], workers: int, rounds: int, scale: float, rest: float) -> dict[str, Any]:
    """{carrier: {rhythm: {p50: [...], p99: [...]}, "rest": %, "after work": %}}."""
    carriers: dict[str, Carrier] = {}
    found: dict[str, Any] = {}
    for name, python in pythons.items():
        carrier = Carrier(name, workers, python)
        try:
            carrier.hear()
            carriers[name] = carrier
            found[name] = {rhythm: {"p50": [], "p99": []} for rhythm in RHYTHMS} | {"rest": [], "after work": []}
        except RuntimeError as e:
            print(e, file=sys.stderr)
    for turn in range(rounds + 1):
        for rhythm in RHYTHMS:
            for name, carrier in carriers.items():
                if turn == 0:  # warm up
                    carrier.ask(do="run", count=50, gap=0)
                    continue
                times = carrier.times(rhythm, scale)
                found[name][rhythm]["p50"].append(statistics.median(times))
                found[name][rhythm]["p99"].append(percentile(times, 0.99))
    for name, carrier in carriers.items():
        carrier.ask(do="run", count=50, gap=0)
        for part, seconds in (("after work", 1.0), ("rest", rest)):
            before, since = carrier.cpu(), time.perf_counter()
            time.sleep(seconds)  # the quantity measured is a rate over time
            used = (carrier.cpu() - before) / (time.perf_counter() - since)
            found[name][part].append(100 * used / (workers + 1))
    for carrier in carriers.values():
        carrier.close()
    return found


GOALS = [  # peer, rhythm, at least so many times as fast
    ("vllm", "back to back", 2.5), ("vllm", "20 ms between", 2.0), ("vllm", "after 1.5 s", 2.0),
    ("ray", "back to back", 20.0),
]  # fmt: skip
FIRST_TRIP, IDLE = 300.0, 0.3  # us after 1.5 s, % of a core
THROUGH_RAY = 1.1  # times as long at most when ranks are Ray actors


def goals(result: dict[str, Any]) -> report.Table:
    """What was asked for and what was reached."""
    rows = []
    for workers, found in result["workers"].items():
        ours = found.get("shm")
        if not ours:
            continue
        ranks = f"{workers} worker{'s' * (workers != '1')}"
        for peer, rhythm, wanted in GOALS:
            if peer in found:
                pairs = zip(found[peer][rhythm]["p50"], ours[rhythm]["p50"], strict=True)
                ratio = statistics.median(a / b for a, b in pairs)
                rows.append([f"{TITLES[peer]} / shm link, {rhythm}, {ranks}", f">= {wanted:g}",
                             f"{ratio:.1f}", "yes" if ratio >= wanted else "no"])  # fmt: skip
        if "ray-link" in found:
            pairs = zip(found["ray-link"]["back to back"]["p50"], ours["back to back"]["p50"], strict=True)
            ratio = statistics.median(a / b for a, b in pairs)
            rows.append([f"{TITLES['ray-link']} / to processes, back to back, {ranks}", f"<= {THROUGH_RAY:g}",
                         f"{ratio:.2f}", "yes" if ratio <= THROUGH_RAY else "no"])  # fmt: skip
        if workers == "1":
            first = statistics.median(ours["after 1.5 s"]["p50"])
            rows.append(["first round trip after 1.5 s, us, 1 worker", f"< {FIRST_TRIP:g}", f"{first:.0f}",
                         "yes" if first < FIRST_TRIP else "no"])  # fmt: skip
        idle = max(statistics.median(ours[part]) for part in ("rest", "after work"))
        rows.append([f"CPU of a worker at rest and after work, %, {ranks}", f"< {IDLE:g}", f"{idle:.2f}",
                     "yes" if idle < IDLE else "no"])  # fmt: skip
    return report.Table("Goals", ["", "goal", "measured", "met"], rows)


def tables(result: dict[str, Any]) -> list[report.Table]:
    made = []
    names = [name for name in TITLES if any(name in found for found in result["workers"].values())]
    for rhythm in RHYTHMS:
        head = [f"{rhythm}, us: p50 / p99", *(f"{w} worker{'s' * (w != '1')}" for w in result["workers"])]
        rows = []
        for name in names:
            cells = []
            for found in result["workers"].values():
                cell = found.get(name, {}).get(rhythm)
                p99 = f"{statistics.median(cell['p99']):,.0f}" if cell else ""
                cells.append(f"{report.spread(cell['p50'], 0)} / {p99}" if cell else "-")
            rows.append([TITLES[name], *cells])
        for peer in names:
            if peer in ("shm", "tcp", "ray-link") or "shm" not in names:
                continue
            ratios = []
            for found in result["workers"].values():
                one, other = (found.get(name, {}).get(rhythm) for name in (peer, "shm"))
                both = one and other
                pairs = [a / b for a, b in zip(one["p50"], other["p50"], strict=True)] if both else []
                ratios.append(report.spread(pairs, 1))
            rows.append([f"{TITLES[peer]} / shm link, rounds compared", *ratios])
        made.append(report.Table(f"Round trip, {rhythm}", head, rows))
    rows = []
    for name in names:
        for part, label in (("rest", "at rest"), ("after work", "first second after work")):
            cells = []
            for found in result["workers"].values():
                cells.append(report.spread(found.get(name, {}).get(part, []), 2))
            rows.append([f"{TITLES[name]}, {label}", *cells])
    head = ["% of a core for each process", *(f"{w} worker{'s' * (w != '1')}" for w in result["workers"])]
    made.append(report.Table("CPU time", head, rows))
    made.append(goals(result))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python")
    parser.add_argument("--ray-python", default=sys.executable if importlib.util.find_spec("ray") else None)
    parser.add_argument("--iceoryx2-python", default=sys.executable if importlib.util.find_spec("iceoryx2") else None)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--only", nargs="+", choices=TITLES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2 rounds of a few round trips")
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--measured", type=Path, help="tables of an earlier run's JSON instead of measuring")
    options = parser.parse_args()
    if options.measured:
        show(json.loads(options.measured.read_text()), options.markdown)
        return
    pythons = dict.fromkeys(OURS, sys.executable)
    if not importlib.util.find_spec("ray"):
        del pythons["ray-link"]
    for name in ("vllm", "ray", "iceoryx2"):
        if python := getattr(options, f"{name}_python"):
            pythons[name] = python
    pythons = {name: python for name, python in pythons.items() if not options.only or name in options.only}
    result: dict[str, Any] = {
        "when": time.strftime("%Y-%m-%d %H:%M"), "cores": os.cpu_count(), "cpu": machine.cpu_name(),
        "step_bytes": len(encode_command(PLAN)), "answer_bytes": len(answer(0, RESULT)), "workers": {},
    }  # fmt: skip
    watch = proc.Foreign(os.getpid())
    rounds, scale, rest = (2, 0.2, 2.0) if options.quick else (options.rounds, 1.0, 5.0)
    for workers in options.workers:
        result["workers"][str(workers)] = measure(pythons, workers, rounds, scale, rest)
    result["foreign"] = watch.percent()
    options.json.parent.mkdir(exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1))
    show(result, options.markdown)


def show(result: dict[str, Any], markdown: Path | None) -> None:
    lines = [
        f"{result['when']}, {result['cpu']}, {result['cores']} cores; step {result['step_bytes']} bytes, answer "
        f"{result['answer_bytes']} bytes. Medians (lowest-highest) of the rounds; other programs used "
        f"{result['foreign']:.0f}% of a core."
    ]
    print(report.as_text(tables(result), lines))
    if markdown:
        report.write_between(markdown, "control_plane", report.as_markdown(tables(result), lines))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank_main()
    elif sys.argv[1:2] == ["--carrier"]:
        trip_, close_ = OURS[sys.argv[2]](int(sys.argv[3]))
        round_trips.serve(trip_)
        close_()
    else:
        main()
