"""The part *overlap* of benchmarks.experts: how much of the exchange of tokens micro-batches hide.

A random Qwen3-MoE in float32 on two data-parallel ranks of one thread each, with `--enable-dbo`, computes prompts;
rounds with steps as a whole and with steps split in two alternate in the same engine. Ranks note when each micro-batch
computes and exchanges; an exchange includes waiting for the other rank. *hidden*: of the time in which a rank
exchanges, the share in which it computes as well; *left*: the rest. Ranks meet over shared memory, over sockets, and
over sockets on a line of so many Mbit/s for both directions (a network namespace whose loopback device tc slows down;
needs root).

Traces for chrome://tracing or Perfetto, one round of split steps each: benchmarks/out/overlap_WAY.json, a process for
each rank.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.micro_batch_trace import Span, traced

OUT = Path(__file__).resolve().parent / "out"
SHAPE = {
    "vocab_size": 1024, "hidden_size": 512, "num_hidden_layers": 8, "num_experts": 16, "moe_intermediate_size": 256,
    "head_dim": 64, "num_attention_heads": 8, "norm_topk_prob": True, "num_experts_per_tok": 4,
    "max_position_embeddings": 1024,
}  # fmt: skip
BUDGET, PROMPTS, ROUNDS = 512, 8, 5  # tokens of a lane in a step; prompts of so many tokens; rounds of each kind
RATES = (1000, 250)  # Mbit/s
WAYS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "sockets": {"disable_custom_all_reduce": True},
    **{f"sockets, {rate} Mbit/s": {"disable_custom_all_reduce": True} for rate in RATES},
}


class Recorder:
    """What workers are extended by."""

    micro_batches: Any
    spans: list[Span]

    def record(self, split: bool) -> None:
        """From now on, with all steps split or none."""
        self.micro_batches.splits = lambda tokens, prefill: split
        if hasattr(self, "spans"):
            self.spans.clear()
        else:
            self.spans = traced(self.micro_batches)

    def recorded(self) -> list[Span]:
        return self.spans


def exchanged(spans: Sequence[Span]) -> tuple[float, float]:
    """Seconds in which a rank exchanges, and of those the seconds in which it computes as well."""
    edges = [(span.begin, 1, span.what == "compute") for span in spans]
    edges += [(span.end, -1, span.what == "compute") for span in spans]
    whole = hidden = last = 0.0
    computing = exchanging = 0
    for at, change, computes in sorted(edges):
        if exchanging:
            whole += at - last
            hidden += (at - last) * (computing > 0)
        last = at
        if computes:
            computing += change
        else:
            exchanging += change
    return whole, hidden


def chrome(ranks: Sequence[Sequence[Span]]) -> dict[str, Any]:
    """Trace events, microseconds; a line for what each micro-batch computes and one for what it exchanges."""
    first = min(span.begin for spans in ranks for span in spans)
    events: list[dict[str, Any]] = []
    for rank, spans in enumerate(ranks):
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        for place in sorted({span.place for span in spans}):
            for line, doing in ((2 * place, "computes"), (2 * place + 1, "exchanges")):
                named = {"name": f"micro-batch {place} {doing}"}
                events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": line, "args": named})
        events += [
            {
                "name": span.what, "ph": "X", "pid": rank, "tid": 2 * span.place + (span.what != "compute"),
                "ts": 1e6 * (span.begin - first), "dur": 1e6 * (span.end - span.begin),
            }
            for span in spans
        ]  # fmt: skip
    return {"traceEvents": events}


def measure(model: str, way: str) -> dict[str, Any]:
    """In this process's network."""
    from planaria import LLM, SamplingParams

    draw = random.Random(0)
    prompts = [[draw.randrange(3, 1000) for _ in range(BUDGET)] for _ in range(PROMPTS)]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    spent: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    tokens: list[list[list[int]]] = []
    with LLM(
        model, dtype="float32", device="cpu", threads=1, max_model_len=BUDGET + 16, max_num_batched_tokens=BUDGET,
        kv_cache_memory="64MiB", skip_tokenizer_init=True, enable_prefix_caching=False, enable_expert_parallel=True,
        data_parallel_size=2, enable_dbo=True, worker_extension_cls="benchmarks.experts_overlap.Recorder", **WAYS[way],
    ) as llm:  # fmt: skip
        llm.generate(prompts[:2], params)  # warm
        for _ in range(ROUNDS):
            for split in (False, True):
                llm.collective_rpc("record", args=(split,))
                since = time.monotonic()
                found = llm.generate(prompts, params)
                seconds[split].append(time.monotonic() - since)
                tokens.append([list(output.outputs[0].token_ids) for output in found])
                ranks = [[Span(*span) for span in spans] for spans in llm.collective_rpc("recorded")]
                both = [exchanged(spans) for spans in ranks]
                spent[split].append((sum(w for w, _ in both) / len(both), sum(h for _, h in both) / len(both)))
    OUT.mkdir(exist_ok=True)
    (OUT / f"overlap_{way.replace(', ', '_').replace(' ', '_').replace('/', '_')}.json").write_text(
        json.dumps(chrome(ranks))
    )
    assert all(each == tokens[0] for each in tokens), "split steps gave other tokens"
    return {
        "hidden": statistics.median(h / w for w, h in spent[True]),
        **{
            name: {
                "seconds": statistics.median(seconds[split]), "shortest": min(seconds[split]),
                "exchange": statistics.median(w for w, _ in spent[split]),
            }
            for name, split in (("whole", False), ("split", True))
        },
    }  # fmt: skip


def overlap_part() -> tuple[dict[str, Any], list[report.Table]]:
    from benchmarks.experts_tokens import checkpoint

    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        checkpoint(Path(place), "qwen3_moe", SHAPE)
        for way in WAYS:
            command = [sys.executable, "-m", "benchmarks.experts_overlap", place, way]
            if rate := way.partition(", ")[2].partition(" ")[0]:
                slow = f"tc qdisc add dev lo root tbf rate {rate}mbit burst 128kb latency 2s"
                command = ["unshare", "-n", "sh", "-c", f'ip link set lo up && {slow} && exec "$@"', "sh", *command]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
            if done.returncode:
                print(f"{way}: skipped, it could not be run here (only root may slow a line down)", flush=True)
                continue
            result[way] = json.loads(done.stdout.splitlines()[-1])
            print(f"{way}: {result[way]}", flush=True)
    rows = []
    for way, one in result.items():
        whole, split = one["whole"], one["split"]
        times = [whole["exchange"], split["exchange"], split["exchange"] * (1 - one["hidden"]),
                 whole["seconds"], split["seconds"]]  # fmt: skip
        gains = [whole[key] / split[key] for key in ("seconds", "shortest")]
        of_a_step = [f"{1e3 * seconds / STEPS:.0f}" for seconds in times]
        rows.append([way, *of_a_step[:2], f"{100 * one['hidden']:.0f}%", *of_a_step[2:], *(f"{g:.2f}" for g in gains)])
    head = [
        "ranks meet over", "exchange, whole", "exchange, split", "hidden", "left", "step, whole", "step, split",
        "times as fast", "by the shortest",
    ]  # fmt: skip
    title = f"ms a step of 2 x {BUDGET} prompt tokens, as a whole and in 2 micro-batches (medians of {ROUNDS} rounds)"
    return result, [report.Table(title, head, rows)]


STEPS = PROMPTS // 2  # of a round


if __name__ == "__main__":
    print(json.dumps(measure(*sys.argv[1:])))
