"""A model by Transformers' code on paged KV beside Transformers' own `generate`, 32 rows at a time, in turn in one run,
on the same random weights and threads. Once all requests have prompts and answers of one length, once of many, as
people ask: `generate` pads prompts and goes on until the longest answer of its 32 is there; here the next request takes
a row that is free. A step here has room for all prompts, as `generate`'s has. Greedy; in float32 both give the same
tokens.

python -m benchmarks.transformers_backend --family olmo2 --layers 12 --hidden 768
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from planaria import LLM, SamplingParams

ROWS, VOCABULARY = 32, 8192
Asked = list[tuple[list[int], int]]  # prompts, and how many tokens are to come


def write(folder: Path, family: str, layers: int, hidden: int) -> Path:
    shape = {
        "hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "vocab_size": VOCABULARY, "max_position_embeddings": 2048,
        "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    made_by: Any = AutoModelForCausalLM
    net = made_by.from_config(AutoConfig.for_model(family, **shape), dtype=torch.float32)
    for parameter in net.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=1.5 * parameter.shape[-1] ** -0.5)
    net.save_pretrained(folder)
    return folder


def lengths(kind: str, requests: int, prompt: int, answer: int) -> Asked:
    def length(row: int, most: int) -> int:
        return most if kind == "one length" else most // 8 + (row * 37 % ROWS) * (most - most // 8) // (ROWS - 1)

    return [
        ([3 + (17 * row + 31 * i * i) % (VOCABULARY - 3) for i in range(length(row, prompt))], length(row + 5, answer))
        for row in range(requests)
    ]


def by_generate(net: Any, asked: Asked) -> list[list[int]]:
    parts = [asked[first : first + ROWS] for first in range(0, len(asked), ROWS)]
    return [ids for part in parts for ids in one_batch(net, part)]


def one_batch(net: Any, asked: Asked) -> list[list[int]]:
    longest, most = max(len(prompt) for prompt, _ in asked), max(count for _, count in asked)
    rows = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in asked])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in asked])
    out = net.generate(rows, attention_mask=mask, max_new_tokens=most, do_sample=False, pad_token_id=0)
    return [ids[longest : longest + count] for ids, (_, count) in zip(out.tolist(), asked, strict=True)]


def by_planaria(llm: LLM, asked: Asked) -> list[list[int]]:
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in asked]
    outputs = llm.generate([prompt for prompt, _ in asked], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def agreed(one: list[list[int]], other: list[list[int]]) -> float:
    """The part of the rows whose tokens are all the same."""
    return sum(a == b for a, b in zip(one, other, strict=True)) / len(one)


def in_turn(seconds: dict[str, list[float]]) -> float:
    """How many times as long `generate` takes, in the median round."""
    return statistics.median(a / b for a, b in zip(seconds["generate"], seconds["planaria"], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", default="olmo2")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    given = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as place:
        folder = write(Path(place), given.family, given.layers, given.hidden)
        torch.set_num_threads(given.threads)
        made_by: Any = AutoModelForCausalLM
        net = made_by.from_pretrained(folder, dtype=torch.float32).eval()
        net.generation_config.eos_token_id = None
        llm = LLM(
            str(folder), model_impl="transformers", max_num_seqs=ROWS, max_model_len=1024, dtype="float32",
            threads=given.threads, skip_tokenizer_init=True, enable_prefix_caching=False,
            max_num_batched_tokens=max(512, ROWS * given.prompt),
        )  # fmt: skip
        for kind in ("one length", "many lengths"):
            asked = lengths(kind, given.requests, given.prompt, given.answer)
            seconds, busy = dict[str, list[float]](), dict[str, list[float]]()
            answers: dict[str, list[list[int]]] = {}
            ways = {"generate": lambda: by_generate(net, asked), "planaria": lambda: by_planaria(llm, asked)}  # noqa: B023
            for _ in range(given.rounds):
                for name, way in ways.items():
                    began, worked = time.perf_counter(), time.process_time()
                    answers[name] = way()
                    seconds.setdefault(name, []).append(time.perf_counter() - began)
                    busy.setdefault(name, []).append(time.process_time() - worked)
            tokens = sum(count for _, count in asked)
            rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
            ratios = {"ratio": in_turn(seconds), "busy": in_turn(busy)}
            rows.append({"lengths": kind, **rates, **ratios, "same": agreed(*answers.values())})
    print(f"{given.family}, {given.layers} layers of {given.hidden}, float32, {given.threads} threads")
    print(f"{given.requests} requests on {ROWS} rows")
    print("| prompts and answers | `generate`, tokens/s | here, tokens/s | ratio | of CPU seconds | the same tokens |")
    print("|---|--:|--:|--:|--:|--:|")
    for row in rows:
        told = f"{row['generate']:.0f} | {row['planaria']:.0f}"
        print(f"| {row['lengths']} | {told} | {row['ratio']:.2f} | {row['busy']:.2f} | {row['same']:.0%} |")
    if given.json:
        Path(given.json).write_text(json.dumps({**vars(given), "rows": rows}))


if __name__ == "__main__":
    main()
