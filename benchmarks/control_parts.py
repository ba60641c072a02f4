"""What the parts of a round trip cost in a process that just ran, and in one that rested 20 ms: microseconds.

    python -m benchmarks.control_parts [--pause 0.02] [--rounds 40]

The step and the answer are those of `benchmarks.control_plane`. Pickle is beside our encoding of the same values, a
pipe's calls beside the futex's. Parts take turns, round after round; medians.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import time
from collections.abc import Callable

from benchmarks import report
from benchmarks.control_plane import PLAN, RESULT
from benchmarks.peers import round_trips
from planaria.executor.link import futex
from planaria.executor.link.codec import answer, encode_command, read_command, read_reply
from planaria.executor.link.shm import ShmLink


def parts(link: ShmLink) -> dict[str, Callable[[], object]]:
    step, reply, plain = encode_command(PLAN), answer(0, RESULT), round_trips.step()
    pickled, limit = pickle.dumps(plain, -1), futex.Limit(0.5).pointer
    word = link.segment.futex(0)
    readable, writable = os.pipe()
    data = bytes(len(step))
    other = link.segment.words[0] ^ 1  # so that a sleep returns at once

    def read() -> object:
        return os.read(readable, len(data))

    return {
        "nothing": lambda: None,
        "encode the step": lambda: encode_command(PLAN),
        "decode the step": lambda: read_command(step),
        "encode the answer": lambda: answer(0, RESULT),
        "decode the answer": lambda: read_reply(reply),
        "futex: wake nobody": word.wake,
        "futex: sleep, refused": lambda: word.sleep(other, limit),
        "pickle the step's values": lambda: pickle.dumps(plain, -1),
        "unpickle them": lambda: pickle.loads(pickled),
        "pipe: write as much": lambda: os.write(writable, data),
        "pipe: read it": read,
    }


def timed(part: Callable[[], object]) -> float:
    since = time.perf_counter_ns()
    part()
    return (time.perf_counter_ns() - since) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pause", type=float, default=0.02)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    link = ShmLink(1)
    found = parts(link)
    rested: dict[str, list[float]] = {name: [] for name in found}
    again: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(options.rounds):
        for name, part in found.items():
            time.sleep(options.pause)
            rested[name].append(timed(part))
            if not name.startswith("pipe"):  # what is written must be read
                again[name].append(min(timed(part) for _ in range(5)))
    for _ in range(options.rounds):
        for name in (name for name in found if name.startswith("pipe")):
            again[name].append(timed(found[name]))
    link.close()
    rows = [
        [name, f"{statistics.median(again[name]):.1f}", f"{statistics.median(rested[name]):.1f}"] for name in found
    ]  # fmt: skip
    head = ["us", "at once again", f"after {1e3 * options.pause:g} ms"]
    print(report.as_text([report.Table("Parts of a round trip", head, rows)], []))


if __name__ == "__main__":
    main()
