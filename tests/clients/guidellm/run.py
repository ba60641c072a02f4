"""guidellm: a benchmark of synthetic prompts, at once and at a rate, by completions and by chats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from steps import HOST, KEY, MODEL, TOKENIZER, client, step

client("guidellm")


def benchmark(name: str, backend: str, *profile: str) -> dict:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "guidellm"), "run", "--disable-console",
         "--backend", f"kind=openai_http,target={HOST},model={MODEL},api_key={KEY}{backend}", *profile,
         "--constraint", "kind=max_requests,count=4", "--tokenizer", f"kind=hf_auto,model={TOKENIZER}",
         "--data", "kind=synthetic_text,prompt_tokens=32,output_tokens=8",
         "--output", f"kind=json,path={name}.json"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    (measured,) = json.loads(Path(f"{name}.json").read_text())["benchmarks"]
    totals = measured["metrics"]["request_totals"]
    assert totals["successful"] == 4 and totals["errored"] == 0, totals
    return measured["metrics"]


@step
def chats_two_at_a_time() -> None:
    metrics = benchmark("chats", "", "--profile", "kind=concurrent,streams=2")
    assert metrics["output_token_count"]["successful"]["mean"] == 8


@step
def completions_at_a_rate() -> None:
    benchmark("completions", ",request_format=/v1/completions", "--profile", "kind=constant,rate=4")
