"""When the stages of a pipeline compute: a trace for chrome://tracing or Perfetto, and how long all do at once.

    python -m benchmarks.pipeline_trace [--model smollm2] [--stages 2] [--requests 32] [--prompt 64] [--output 64]
                                        [--trace benchmarks/out/pipeline.json]

Each rank notes the begin and end of its part of every step (the clock is the node's). Steps of one stage follow one
another; what counts is how long every stage is in one at the same time, over the time from the first begin to the last
end. Without micro-steps the stages would wait for one another and this would be 0. One request alone can't overlap.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from planaria import LLM, SamplingParams
from planaria.worker.stage import Stage

OUT = Path(__file__).resolve().parent / "out" / "pipeline.json"
Span = tuple[int, float, float]  # number of the step, begin, end in seconds


def traced(stage: Stage) -> list[Span]:
    """Each of its forward passes from now on."""
    forward, spans = stage.forward, list[Span]()

    def timed() -> Any:
        since = time.monotonic()
        out = forward()
        spans.append((len(spans) + 1, since, time.monotonic()))
        return out

    stage.forward = timed
    return spans


class Recorder:
    """What workers are extended by."""

    runner: Any
    spans: list[Span]

    def record_steps(self) -> None:
        """From now on."""
        self.spans = traced(self.runner.stage)

    def recorded_steps(self) -> list[Span]:
        return self.spans


def overlap(stages: list[list[Span]]) -> tuple[float, float]:
    """Shares of the time from the first begin to the last end: with all stages busy, and with any."""
    spans = [span for stage in stages for span in stage]
    edges = sorted([(begin, 1) for _, begin, _ in spans] + [(end, -1) for _, _, end in spans])
    every = some = 0.0
    busy, last = 0, edges[0][0]
    for at, change in edges:
        every += (at - last) * (busy == len(stages))
        some += (at - last) * (busy > 0)
        busy, last = busy + change, at
    whole = edges[-1][0] - edges[0][0]
    return every / whole, some / whole


def chrome(stages: list[list[Span]]) -> dict[str, Any]:
    """Trace events, a process for each stage; microseconds."""
    first = min(begin for spans in stages for _, begin, _ in spans)
    return {
        "traceEvents": [
            {
                "name": f"step {step}", "ph": "X", "pid": stage, "tid": 0, "ts": 1e6 * (begin - first),
                "dur": 1e6 * (end - begin), "args": {"step": step},
            }
            for stage, spans in enumerate(stages)
            for step, begin, end in spans
        ]
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--output", type=int, default=64, help="tokens")
    parser.add_argument("--partition", help="layers of each stage, e.g. 19,11 [evenly]")
    parser.add_argument("--trace", type=Path, default=OUT)
    options = parser.parse_args()
    source = random.Random(0)
    prompts = [[source.randrange(100, 1000) for _ in range(options.prompt)] for _ in range(options.requests)]
    params = SamplingParams(max_tokens=options.output, temperature=0.0, ignore_eos=True, detokenize=False)
    extra = {"pp_layer_partition": options.partition} if options.partition else {}
    llm = LLM(
        options.model, pipeline_parallel_size=options.stages, threads=1, max_model_len=options.prompt + options.output,
        worker_extension_cls="benchmarks.pipeline_trace.Recorder", enable_prefix_caching=False, **extra,
    )  # fmt: skip
    try:
        llm.generate(prompts, params)  # warm
        llm.collective_rpc("record_steps")
        llm.generate(prompts, params)
        stages = [[(int(s), float(b), float(e)) for s, b, e in spans] for spans in llm.collective_rpc("recorded_steps")]
    finally:
        llm.close()
    every, some = overlap(stages)
    options.trace.parent.mkdir(parents=True, exist_ok=True)
    options.trace.write_text(json.dumps(chrome(stages)))
    print(f"{options.requests} requests of {options.prompt} + {options.output} tokens, {options.stages} stages")
    print(f"all stages busy at once: {100 * every:.0f}% of the time; any: {100 * some:.0f}%")
    for stage, spans in enumerate(stages):
        busy = sum(end - begin for _, begin, end in spans)
        print(f"  stage {stage}: {len(spans)} steps, {1e3 * busy / len(spans):.1f} ms each")
    print(f"trace: {options.trace}")


if __name__ == "__main__":
    main()
