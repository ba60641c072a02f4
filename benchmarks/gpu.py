"""Everything about GPUs that can be measured here, correctness first; writes docs/gpu.md's tables by itself.

    python -m benchmarks.gpu [--cases correct,host,bandwidth,memory,smollm2,7b,7b-int4,recovery] [--page docs/gpu.md]

With a device: tests/gpu, then tokens a second of one stream and of 32 to 256 (SmolLM2, and a random model of Llama 7B's
layout, in bfloat16 and at 4 bits), beside the bandwidth measured in the same run and beside vLLM where it is installed;
which attention that was, and how many shapes of steps were recorded; the time to the first token; how often a step
waits for the device, and how much of the time that computes, by torch's profile; memory that a keeper has for ranks,
and the pause when a rank is killed. Without one: what Triton's interpreter and stand-ins show, and the host's time and
waits of a step with kernels that do nothing; the page says that nothing ran on hardware. A case that fails is said to
have, with the end of what it said, also in the page; the others go on.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import report
from benchmarks.convert import bf16_folder
from planaria.kernels.gpu.draw import Drawer, DrawnTokens

ROOT = Path(__file__).resolve().parents[1]
OUT = Path(__file__).resolve().parent / "out"
CASES = ("correct", "host", "bandwidth", "memory", "smollm2", "7b", "7b-int4", "recovery")
STREAMS = (1, 32, 64, 128, 256)
PROMPT, TOKENS = 32, 256
HANGS = 1800  # seconds after which a case is given up
WITHOUT = (  # tests that need no device
    "gpu_kernels", "gpu_waits", "triton_experts", "step_graphs", "symmetric", "staged_ranks", "device_memory"
)  # fmt: skip
LLAMA_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip


def correct(here: bool) -> dict[str, Any]:
    """The tests that fit this machine; of those that failed, which."""
    without = [f"tests/model/test_{name}.py" for name in WITHOUT]
    files = ["tests/gpu"] if here else without
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--tb=short", "-rfE", "-m", "not long", *files],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANGS,
    )  # fmt: skip
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", found.stdout)}
    wrong = re.findall(r"^(?:FAILED|ERROR) (\S+)", found.stdout, re.MULTILINE)
    return {"files": " ".join(files), **counts, "wrong": wrong, "code": found.returncode, "end": found.stdout[-4000:]}


# -- the host's part


class NullDrawer(Drawer):
    """Stages as a `Drawer` does; every token is 0."""

    def spare(self) -> NullDrawer:
        return self

    def draw(self, logits: Any, *, cuts: bool | None = None) -> None:
        pass

    def follow(self, tokens: Any, drawn_at: Any) -> None:
        pass


class NullRecorder:
    beside = False

    def enter(self) -> None:
        pass

    def record(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        return lambda: None, work()


class Streams:
    """`rows` streams as an engine's core and a worker step them, in this process. ops: with a drawer and a recorder.
    Their lengths differ, so that every step gives some of them a block."""

    def __init__(self, ops: Any, forward: Callable[[Any], Any], rows: int, vocab: int, longest: int = 1024) -> None:
        from planaria.config.options import CacheConfig, SchedulerConfig
        from planaria.core.engine import EngineCore
        from planaria.kernels.ops import Batch
        from planaria.types import Request, SamplingParams
        from planaria.worker.runner import Runner
        from planaria.worker.torch_sampler import TorchSampler

        size, most = 16, rows + 256
        scheduler = SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=2048, max_model_len=longest, depth=1, max_logit_rows=most
        )
        batch = Batch(2048, rows, longest // size + 1, most)
        ops._shared = lambda x: x  # as on a device
        sampler = TorchSampler(rows, vocab, drawer=ops.drawer)
        self.runner = Runner(batch, ops.compile(forward, batch), sampler, scheduler, size)
        self.core = EngineCore(scheduler, CacheConfig(block_size=size), rows * longest // size)
        for i in range(rows):
            prompt = [(i + j) % vocab for j in range(PROMPT + i % size)]
            params = SamplingParams(temperature=0.8)
            self.core.admit(Request(f"r{i}", prompt, params, i, max_tokens=longest - PROMPT - size))

    def step(self) -> tuple[int, list[float]]:
        """How many drew, and the milliseconds of a processor to plan the step, on its worker, and to commit it."""
        from planaria.protocol import StepResult

        at = [time.thread_time()]  # of a processor: what else runs here is no part of it
        plan = self.core.plan(0.0)
        at.append(time.thread_time())
        assert plan is not None
        part = self.runner.step(plan.step, plan.lanes[0], plan.freed_rows[0], plan.turn)
        at.append(time.thread_time())
        self.core.commit(StepResult(plan.epoch, plan.step, (part,)))
        at.append(time.thread_time())
        return len(part.rows), [(after - before) * 1e3 for before, after in itertools.pairwise(at)]


WAITS = {  # what torch's profile calls that which brings values to the host
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::bincount", "tokens",
}  # fmt: skip


def waits(step: Callable[[], Any], steps: int = 50) -> float:
    """How often a step waits for its device, by torch's profile of so many, where nothing is a device: for values that
    are brought to the host, and where drawn tokens are read."""
    read = DrawnTokens.read

    def noted(drawn: DrawnTokens) -> Any:
        with torch.profiler.record_function("tokens"):
            return read(drawn)

    DrawnTokens.read = noted  # type: ignore[method-assign, assignment]
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(steps):
                step()
    finally:
        DrawnTokens.read = read  # type: ignore[method-assign]
    return float(sum(each.count for each in profile.key_averages() if each.key in WAITS) / steps)


def host(rows: int = 256, steps: int = 400, vocab: int = 32000) -> dict[str, Any]:
    """Milliseconds of a processor that a step of `rows` streams takes where the device takes no time: to plan it, on
    its worker, to commit it, and the three together; of each the median, and what 9 in 10 stay below. And its waits."""
    from planaria.kernels.gpu.ops import GpuOps

    ops = GpuOps("cpu", "bfloat16")
    ops.recorder, ops.drawer = NullRecorder(), NullDrawer(rows, vocab, torch.device("cpu"))
    ops.kv_layer(1, 16, 1, 1)
    logits = torch.zeros(rows + 256, vocab)
    streams = Streams(ops, lambda own: logits[: len(own.step.sample_index)], rows, vocab)
    times, threads = list[list[float]](), torch.get_num_threads()
    torch.set_num_threads(1)
    while len(times) < steps:
        drew, each = streams.step()
        if drew == rows and ops.graphs[0].ready:
            times.append(each)
    waited = waits(streams.step)
    torch.set_num_threads(threads)
    parts = dict(zip(("plan", "worker", "commit"), zip(*times, strict=True), strict=True))
    parts["all"] = tuple(sum(each) for each in times)
    return {
        "rows": rows,
        "waits": waited,
        **{name: [statistics.median(own), sorted(own)[len(own) * 9 // 10]] for name, own in parts.items()},
    }


# -- a device


def bandwidth(size: int = 4 << 30) -> float:
    """Bytes a second of reading: a sum over memory far larger than any cache."""
    x = torch.ones(size // 4, device="cuda")
    times = list[float]()
    for _ in range(7):
        torch.cuda.synchronize()
        since = time.perf_counter()
        x.sum()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - since)
    return size / min(times)


def keeping(kind: str = "cuda", size: int = 4 << 30) -> dict[str, float]:
    """Seconds until memory of a keeper is there: made for who asks first, and mapped by who comes after."""
    from planaria.hosts.device_keeper import OwnedKeepers
    from planaria.hosts.device_memory import Keepers

    owned, found = OwnedKeepers(kind, [0]), dict[str, float]()
    try:
        keepers = Keepers(owned.keeping, 0)
        keepers.held()  # it has come up
        since = time.perf_counter()
        there = keepers.take("x/", size)
        found["made"], since = time.perf_counter() - since, time.perf_counter()
        again = keepers.find("x/", writable=False)
        found["mapped"] = time.perf_counter() - since
        assert again is not None and len(there) == len(again) >= size
        found["bytes"] = len(again)
    finally:
        owned.close()
    return found


def random_llama(folder: Path, config: dict[str, Any] = LLAMA_7B) -> Path:
    """A checkpoint of such a layout: rows of one random block, over and over. Of Llama 7B's 13.5 GB."""
    from safetensors.torch import save_file

    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    block = np.random.default_rng(0).normal(0, 0.02, (1024, inner)).astype(np.float32).view(np.uint32) >> 16

    def matrix(rows: int, columns: int) -> Any:
        part = block.astype(np.uint16)[:, :columns]
        return np.tile(part, (-(-rows // len(part)), 1))[:rows]

    def save(name: str, tensors: dict[str, Any]) -> None:
        halves = {key: torch.from_numpy(value).view(torch.bfloat16) for key, value in tensors.items()}
        save_file(halves, folder / name, metadata={"format": "pt"})

    ones = np.full(hidden, 0x3F80, np.uint16)
    index = dict[str, str]()
    for layer in range(config["num_hidden_layers"]):
        own, at = f"model-{layer:02}.safetensors", f"model.layers.{layer}"
        tensors = {f"{at}.self_attn.{part}_proj.weight": matrix(hidden, hidden) for part in "qkvo"}
        tensors |= {f"{at}.mlp.{part}_proj.weight": matrix(inner, hidden) for part in ("gate", "up")}
        tensors |= {f"{at}.mlp.down_proj.weight": matrix(hidden, inner)}
        tensors |= {f"{at}.{part}_layernorm.weight": ones.copy() for part in ("input", "post_attention")}
        save(own, tensors)
        index |= dict.fromkeys(tensors, own)
    rest = {
        "model.embed_tokens.weight": matrix(vocab, hidden), "lm_head.weight": matrix(vocab, hidden),
        "model.norm.weight": ones,
    }  # fmt: skip
    save("model-rest.safetensors", rest)
    index |= dict.fromkeys(rest, "model-rest.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Prints one JSON line: seconds until the first token, tokens a second of each number of streams, and of ours what its
# kernels say (which attention, and of steps that are recorded, or why they aren't), and torch's profile of 32 streams.
DRIVER = """
import json, logging, sys, time
which, model, options, streams, prompt, tokens = json.loads(sys.argv[1])
since = time.perf_counter()
if which == "vllm":
    from vllm import LLM, SamplingParams
else:
    from planaria import LLM, SamplingParams
kernels, said = logging.getLogger("planaria.kernels"), []
kernels.setLevel(logging.DEBUG)
hear = logging.Handler()
hear.emit = lambda record: said.append(record.getMessage())
kernels.addHandler(hear)
llm = LLM(model, skip_tokenizer_init=True, **options)
def go(count, many):
    params = SamplingParams(temperature=0, max_tokens=many, ignore_eos=True, detokenize=False)
    asked = [{"prompt_token_ids": [(7 * i + j) % 1000 + 3 for j in range(prompt)]} for i in range(count)]
    begun = time.perf_counter()
    done = llm.generate(asked, params, use_tqdm=False)
    assert all(len(each.outputs[0].token_ids) == many for each in done)
    return time.perf_counter() - begun
def recorded():
    return sum(line.startswith("recorded: ") for line in said)
go(1, 1)
found = {"first": time.perf_counter() - since, "before": recorded(), "rates": {}}
for count in streams:
    go(count, tokens)
    short, long = min(go(count, 8) for _ in range(3)), min(go(count, tokens) for _ in range(3))
    found["rates"][count] = count * (tokens - 8) / (long - short)
found["recorded"] = recorded()
if which == "planaria" and options.get("device") == "cuda":
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        seconds = go(32, 64)
    times = {each.key: each for each in trace.key_averages()}
    waits = sum(times[name].count for name in times if name.startswith("cuda") and "Synchronize" in name)
    busy = sum(each.self_device_time_total for each in times.values()) / 1e6
    found |= {"waits": waits / 64, "busy": busy / seconds}
found["said"] = [line for line in said if line.startswith(("attention (", "steps are not recorded"))]
print(json.dumps(found))
"""


def engine(which: str, model: str, options: dict[str, Any], streams: tuple[int, ...] = STREAMS) -> dict[str, Any]:
    asked = json.dumps([which, model, options, streams, PROMPT, TOKENS])
    done = subprocess.run(
        [sys.executable, "-c", DRIVER, asked], capture_output=True, text=True, cwd=ROOT, check=False, timeout=HANGS
    )
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def model_case(model: str, weight_bytes: int, limit: float, options: dict[str, Any]) -> dict[str, Any]:
    """limit: bytes a second."""
    found: dict[str, Any] = {"planaria": tried(engine, "planaria", model, {"device": "cuda", **options})}
    if importlib.util.find_spec("vllm") is not None and "quantization" not in options:
        found["vllm"] = tried(engine, "vllm", model, {"dtype": "bfloat16"})
    found["limit"] = limit / weight_bytes
    return found


def tried(case: Callable[..., Any], *args: Any) -> Any:
    """What it found; or `error`, and the other cases go on."""
    try:
        return case(*args)
    except subprocess.TimeoutExpired as e:
        said = b"".join(each if isinstance(each, bytes) else (each or "").encode() for each in (e.stdout, e.stderr))
        return {"error": f"{said.decode(errors='replace')[-2000:]}\nit did not end in {HANGS} s"}
    except Exception as e:
        traceback.print_exc()
        return {"error": f"{type(e).__name__}: {e}"}


def killed() -> dict[str, Any]:
    """A rank of one device is killed while streams run."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recovery", "--cases", "rank", "--ranks", "1"], cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=HANGS,
    )  # fmt: skip
    if done.returncode:
        return {"error": done.stderr[-2000:]}
    rounds = json.loads((OUT / "recovery-128.json").read_text())["cases"]["rank"]["rounds"]
    return {"all": statistics.median(each["all"] for each in rounds), "failed": sum(len(r["failed"]) for r in rounds)}


# -- the page


def tables(found: dict[str, Any], here: str) -> list[report.Table]:
    rows = list[list[str]]()
    if "correct" in found:
        own = found["correct"]
        said = ", ".join(f"{own[what]} {what}" for what in ("passed", "failed", "error", "skipped") if what in own)
        rows.append([f"`pytest {own['files']}`", "all pass", said])
        rows += [["", "", f"failed: `{name}`"] for name in own["wrong"]]
    failed = {name for name, own in found.items() if isinstance(own, dict) and "error" in own}
    rows += [[name, "", _failure(found[name])] for name in CASES if name in failed]
    found = {name: own for name, own in found.items() if name not in failed}
    if "host" in found:
        own = found["host"]
        for part, goal in (("all", "< 0.3"), ("plan", ""), ("worker", ""), ("commit", "")):
            name = f"host time of a step, {own['rows']} rows, null kernels, ms: {part}"
            rows.append([name, goal, f"{own[part][0]:.3f} (9 in 10: {own[part][1]:.3f})"])
        rows.append(
            ["waits for a stand-in of the device in such a step, by torch's profile", "<= 1", f"{own['waits']:.2f}"]
        )
    if "bandwidth" in found:
        rows.append(["bandwidth, GB/s", "", f"{found['bandwidth'] / 1e9:.0f}"])
    if "memory" in found:
        own = found["memory"]
        rows.append([
            f"{own['bytes'] / (1 << 30):.0f} GiB of a keeper, ms: made, mapped by the next", "",
            f"{own['made'] * 1e3:.1f}, {own['mapped'] * 1e3:.1f}",
        ])  # fmt: skip
    for name in ("smollm2", "7b", "7b-int4"):
        rows += _model_rows(name, found.get(name, {}))
    if "recovery" in found:
        own = found["recovery"]
        said = f"{own['all']:.2f}, {own['failed']} failed"
        rows.append(["a rank killed: until all streams go on, s", "<= 3, 0 failed", said])
    made = [report.Table(f"Measured: {here}", ["", "goal", "found"], rows)]
    if here == NOWHERE:
        missing = [[name, "not run on hardware"] for name in CASES[2:]]
        made.append(report.Table("Left for a device", ["case", ""], missing))
    return made


def _model_rows(name: str, found: dict[str, Any]) -> list[list[str]]:
    rows = list[list[str]]()
    own, peer = found.get("planaria", {}), found.get("vllm", {})
    rows += [[f"{name}{who}", "", _failure(side)] for who, side in (("", own), (": vLLM", peer)) if "error" in side]
    if "first" in own:
        before = f"{own['first']:.1f}, {own['before']} steps recorded before"
        rows.append([f"{name}: start to first token, s", "<= 10, 0 before", before])
        said = "; ".join([str(own["recorded"]), *own["said"]])
        rows.append([f"{name}: shapes of steps that were recorded", "> 0", said])
    if "waits" in own:
        said = f"{own['waits']:.2f}, {own['busy']:.0%}"
        rows.append([f"{name}: waits for the device in a step of 32, how much of the time it computes", "<= 1", said])
    for count, rate in own.get("rates", {}).items():
        theirs = peer.get("rates", {}).get(count)
        beside = f", {rate / theirs:.2f} x vLLM" if theirs else ""
        share = f", {rate / found['limit']:.0%} of the limit" if count == "1" else ""
        goal = ">= 80% of the limit" if count == "1" else ">= 1.0 x vLLM"
        rows.append([f"{name}: {count} streams, tokens/s", goal, f"{rate:.0f}{share}{beside}"])
    return rows


def _failure(found: dict[str, Any]) -> str:
    """Its last error, or what it said last."""
    lines = [line for line in found["error"].splitlines() if line.strip()] or ["it said nothing"]
    return f"failed: {([line for line in lines if re.match(r'[A-Za-z_.]*Error: ', line)] or lines)[-1]}"


NOWHERE = "not run on hardware"


def run(cases: list[str], here: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "correct" in cases:
        found["correct"] = tried(correct, here)
        print(found["correct"].get("end", ""), file=sys.stderr)
    if "host" in cases:
        found["host"] = tried(host)
    if not here:
        return found
    limit = found["bandwidth"] = tried(bandwidth)
    if isinstance(limit, dict):
        return found  # the device reads nothing
    torch.cuda.empty_cache()
    if "memory" in cases:
        found["memory"] = tried(keeping)
    if "smollm2" in cases:
        bfloat16 = {"dtype": "bfloat16"}
        found["smollm2"] = tried(lambda: model_case(str(bf16_folder("smollm2")), 135_000_000 * 2, limit, bfloat16))
    if {"7b", "7b-int4"} & {*cases}:
        with tempfile.TemporaryDirectory() as folder:
            model, weights = str(random_llama(Path(folder))), 6_607_000_000
            if "7b" in cases:
                found["7b"] = model_case(model, weights * 2, limit, {"dtype": "bfloat16"})
            if "7b-int4" in cases:
                packed = {"dtype": "bfloat16", "quantization": "q4_1"}
                found["7b-int4"] = model_case(model, weights * 5 // 8, limit, packed)
    if "recovery" in cases:
        found["recovery"] = tried(killed)
    return found


def _load() -> str:
    return f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "gpu.md")
    options = parser.parse_args()
    device = torch.cuda.is_available()
    here = torch.cuda.get_device_name(0) if device else NOWHERE
    found = run(options.cases.split(","), device)
    OUT.mkdir(exist_ok=True)
    (OUT / "gpu.json").write_text(json.dumps({"device": here, **found}, indent=1))
    made, note = tables(found, here), f"{time.strftime('%Y-%m-%d %H:%M')}, torch {torch.__version__}, {_load()}"
    print(report.as_text(made, [note]))
    report.write_between(options.page, "gpu", report.as_markdown(made, [note]))
    sys.exit(any("error" in own or own.get("code") for own in found.values() if isinstance(own, dict)))


if __name__ == "__main__":
    main()
