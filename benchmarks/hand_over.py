"""TracePrompts and what follows them on engines of two kinds: what a hand-over costs, and what it gives.

    python -m benchmarks.hand_over [--model smollm2] [--cases prompt,trace,request] [--tokens 1024] [--rounds 8]
        [--trace FILE.csv] [--requests 60] [--share 0.6 | --rate R] [--length-scale 0.25] [--ttft 4] [--gap 0.25]

prompt: a server with one engine of each kind is asked for prompts of that length, one after the other, each its own.
`prefill` is the time to the first token, `transfer` what ranks say it took until all blocks were there, `pause` the
time between the first token and the second, less the median of the gaps after it: all that the hand-over costs.

trace: requests come as in a trace (docs: `planaria bench serve --trace`), lengths times --length-scale and cut to what
the model takes, to `-dp 2` all at once first, which says how many a second it can take, then to `-dp 2` and to 1 + 1,
in turn, at that rate times --share, and all at once to 1 + 1. --rate: so many a second, and nothing at once; --turns:
rounds of that; what is told are medians. `-dp 2, short steps` are engines of one kind whose steps are short for all.
request: one request over both engines, written for chrome://tracing to benchmarks/out/hand_over.trace.json, from the
spans that a server sends to a collector (needs the extra `otel`).

goodput: requests a second whose first token came within --ttft seconds and none of whose gaps was longer than --gap.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.deployment import Server, patient_client
from benchmarks.kv_tier import WARM, metric, prompt
from planaria.cli.bench_serve import body, drive, figures
from planaria.cli.traces import Trace, TracePrompts, read_trace

OUT = Path(__file__).resolve().parent / "out" / "hand_over.json"
TRACE = OUT.with_name("hand_over.trace.json")
APART = ("--prefill-engines", "1", "--decode-engines", "1")
KINDS = {
    "-dp 2": ("-dp", "2"), "1 + 1": APART,
    "-dp 2, short steps": ("-dp", "2", "--max-num-batched-tokens", "64", "--max-num-seqs", "32"),
}  # fmt: skip
FOLLOW, LENGTH = 24, 2048  # tokens after a prompt; of the model
OPTIONS = ("--threads", "1", "--log-level", "warning", "--max-model-len", str(LENGTH), "--kv-cache-memory", "512MiB")


async def gaps(server: Server, ids: list[int]) -> list[float]:
    """Seconds until the first token, then between one and the next."""
    times = [time.perf_counter()]
    async with patient_client() as client:
        async for choice in server.stream(client, server.body(ids, FOLLOW)):
            times += [time.perf_counter()] * len(choice["token_ids"])
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def prompts(model: str, tokens: int, rounds: int) -> dict[str, Any]:
    found: list[dict[str, float]] = []
    with Server(model, *OPTIONS, *APART) as server:
        asyncio.run(gaps(server, prompt(WARM, tokens)))  # its memory is touched for the first time
        for number in range(rounds):
            names = [f"planaria:kv_transfer_{name}_total" for name in ("seconds", "bytes")]
            before = [metric(server, name) for name in names]
            first, second, *rest = asyncio.run(gaps(server, prompt(1000 + number, tokens)))
            seconds, moved = (metric(server, name) - was for name, was in zip(names, before, strict=True))
            pause = max(0.0, second - statistics.median(rest))
            found.append({"prefill": first, "transfer": seconds, "pause": pause, "bytes": moved})
        if failed := metric(server, "planaria:kv_transfer_failed_total"):
            raise RuntimeError(f"{failed:.0f} transfers failed")
    middle = {name: statistics.median(each[name] for each in found) for name in found[0]}
    shares = {name: statistics.median(each[name] / each["prefill"] for each in found) for name in ("transfer", "pause")}
    print(
        f"a prompt of {tokens} tokens, {middle['bytes'] / 2**20:.1f} MiB, {rounds} times, medians: prefill "
        f"{middle['prefill']:.2f} s; its blocks came in {1e3 * middle['transfer']:.0f} ms ({shares['transfer']:.1%}), "
        f"the stream paused for {1e3 * middle['pause']:.0f} ms ({shares['pause']:.1%}; goal: 3% on one node)"
    )
    return {"tokens": tokens, "samples": found, "shares": shares}


def planned(model: str, trace: Trace, rate: float | None) -> list[tuple[float, bytes]]:
    """rate: requests a second on the whole; None: all at once."""
    arrivals, made = trace.arrivals, TracePrompts(trace.block_len, 0, 100, 40_000)
    stretch = 0.0 if rate is None else len(arrivals) / rate / arrivals[-1].at
    return [(each.at * stretch, body(model, made.tokens(each), each.output_len)) for each in arrivals]


def served(model: str, kinds: tuple[str, ...], trace: Trace, rate: float | None, slo: tuple[float, float]) -> Any:
    with Server(model, *OPTIONS, *kinds) as server:
        asyncio.run(gaps(server, prompt(WARM, 256)))
        work = planned(model, trace, rate)
        samples, took = asyncio.run(drive(server.url, {}, work, None, lambda done, tokens: None))
    result = figures(trace.arrivals, samples, took)
    if result["failed"]:
        raise RuntimeError(f"{result['failed']} requests failed: {result['errors'][:3]}")
    good = sum(s.ttft <= slo[0] and max(s.gaps, default=0.0) <= slo[1] for s in samples)
    return result | {"good_per_s": good / took}


def traced(model: str, args: argparse.Namespace) -> dict[str, Any]:
    whole = read_trace(Path(args.trace), args.requests).scaled(args.length_scale)
    most = LENGTH - 128
    cut = [a._replace(input_len=min(a.input_len, most), output_len=min(a.output_len, 128)) for a in whole.arrivals]
    trace, slo = Trace(cut, whole.block_len), (args.ttft, args.gap)
    found: dict[str, list[Any]] = {}
    rate = args.rate
    if rate is None:
        at_once = served(model, KINDS["-dp 2"], trace, None, slo)
        rate = args.share * at_once["requests_per_s"]
        found = {"-dp 2, at once": [at_once], "1 + 1, at once": [served(model, APART, trace, None, slo)]}
    for _, (name, kinds) in itertools.product(range(args.turns), KINDS.items()):
        found.setdefault(name, []).append(served(model, kinds, trace, rate, slo))
        show(name, found[name][-1])
    print(f"{len(cut)} requests, {rate:.2f}/s; SLO: first token in {slo[0]:g} s, gaps of {slo[1]:g} s at most; medians")
    return {name: middle(name, several) for name, several in found.items()}


def middle(name: str, several: list[Any]) -> Any:
    """Of several rounds, by goodput; shown."""
    one = sorted(several, key=lambda each: each["good_per_s"])[len(several) // 2]
    show(name, one)
    return one


def show(name: str, one: Any) -> None:
    print(
        f"{name:>20}: {one['requests_per_s']:.2f} requests/s, {one['output_tokens_per_s']:.0f} tokens/s, first "
        f"token p50 {one['ttft_ms']['median']:.0f} p99 {one['ttft_ms']['p99']:.0f} ms, gap p50 "
        f"{one['inter_token_ms']['median']:.0f} p99 {one['inter_token_ms']['p99']:.0f} ms, "
        f"{one['good_per_s']:.2f} good/s",
        flush=True,
    )


def chrome(spans: list[Any]) -> list[dict[str, Any]]:
    """Events for chrome://tracing: a row for the request, one for its parts, one for each engine."""
    rows = {"queue": 1, "prefill": 1, "decode": 1}
    events = [
        {"name": span.name, "ph": "X", "pid": 0, "ts": span.start_time_unix_nano / 1e3,
         "dur": (span.end_time_unix_nano - span.start_time_unix_nano) / 1e3,
         "tid": 2 + int(span.name.split()[1]) if span.name.startswith("engine ") else rows.get(span.name, 0)}
        for span in spans
    ]  # fmt: skip
    return sorted(events, key=lambda event: (event["tid"], event["ts"]))


def traced_request(model: str, tokens: int) -> list[dict[str, Any]]:
    from tests.collector import Collector

    with Collector() as collector:
        with Server(model, *OPTIONS, *APART, "--otlp-traces-endpoint", collector.url) as server:
            asyncio.run(gaps(server, prompt(WARM, tokens)))  # its memory is touched for the first time
            asyncio.run(gaps(server, prompt(1000, tokens)))
        last = max(
            (span for span in collector.gather() if not span.parent_span_id), key=lambda s: s.start_time_unix_nano
        )
        events = chrome([last, *collector.children(last).values()])
    TRACE.parent.mkdir(exist_ok=True)
    TRACE.write_text(json.dumps({"traceEvents": events}))
    for event in events:
        at = (event["ts"] - events[0]["ts"]) / 1e3
        print(f"{event['name']:>24}: from {at:.1f} ms, for {event['dur'] / 1e3:.1f} ms")
    print(f"written to {TRACE}, for chrome://tracing")
    return events


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cases", default="prompt,trace")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--trace")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--share", type=float, default=0.6)
    parser.add_argument("--length-scale", type=float, default=0.25)
    parser.add_argument("--ttft", type=float, default=4.0)
    parser.add_argument("--gap", type=float, default=0.25)
    args = parser.parse_args()
    cases, result = args.cases.split(","), dict[str, Any]()
    if "prompt" in cases:
        result["prompt"] = prompts(args.model, args.tokens, args.rounds)
    if "request" in cases:
        result["request"] = traced_request(args.model, args.tokens)
    if "trace" in cases:
        if args.trace is None:
            parser.error("the case trace needs --trace FILE.csv")
        result["trace"] = traced(args.model, args)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
