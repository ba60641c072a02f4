"""Do features change each other's answers? Each pair of them, without a fault, with a rank or the engine killed.

    python -m benchmarks.feature_matrix [--configs 1,2] [--faults none,rank,engine] [--markdown docs/speculation.md]

What requests ask for (a grammar, tools, calls that have to be made, penalties, log-probabilities, several choices,
seeds; each, and each pair that can be asked for together) is asked of a plain server of one rank in float32, once. Then
servers with features of their own, several at a time so that each pair of them is there (drafts, prompts in parts,
prefixes found again, too little memory, priorities, tensor ranks, stages), get the same requests at once, and all
tokens must be the same. When the first stream is a third through, the victim is killed. A cell of the table says in how
many answers both features were there, and how many of these had other tokens.

Lanes are of a model with experts, and models and heads that draft must fit the one that is served: servers with these
have a small random one; the model that drafts for it is another, and so is its head.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import report
from benchmarks.deployment import Server, patient_client, wait_healthy

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}  # fmt: skip
ASKS: dict[str, dict[str, Any]] = {
    "grammar": {"structured_outputs": {"json": SCHEMA}},
    "tools": {"tools": [TOOL]},
    "forced calls": {"tools": [TOOL], "tool_choice": "required"},
    "penalties": {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "n": {"n": 2},
    "seeds": {"temperature": 0.9, "seed": 5, "top_p": 0.95},
}
APART = set(map(frozenset, itertools.combinations(("grammar", "tools", "forced calls"), 2)))  # each holds the answer
TOPIC = "List, and repeat: circle, square, circle, square, triangle, circle, square, circle, square. "
TOKENS = 40
PLAIN = ["--dtype", "float32", "--quantization", "none", "--max-model-len", "1024", "--no-enable-prefix-caching"]
TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}
A call is <tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
TOOLS = ["--chat-template", TEMPLATE, "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
OPTIONS: dict[str, list[str]] = {
    "ngram": ["--speculative-config", '{"method": "ngram"}'],
    "suffix": ["--speculative-config", '{"method": "suffix"}'],
    "chunked prefill": ["--max-num-batched-tokens", "48", "--max-num-seqs", "48"],
    "prefix hit": ["--enable-prefix-caching"],
    "preemption": ["--kv-cache-memory", "48MiB"],
    "priority": ["--scheduling-policy", "priority"],
    "TP": ["-tp", "2"],
    "PP": ["-pp", "2"],
    "lanes": ["-dp", "2", "--enable-expert-parallel"],
    "draft model": ["--speculative-config", '{"method": "draft_model", "model": "MODEL-draft"}'],
    "eagle": ["--speculative-config", '{"method": "eagle", "model": "MODEL-head"}'],
}
SMALL = {"lanes", "draft model", "eagle"}  # features of the small model
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "head_dim": 32}
LESS_MEMORY = ["--kv-cache-memory", "2MiB"]
CONFIGS = [
    ("ngram", "chunked prefill", "prefix hit", "TP"),
    ("suffix", "preemption", "priority", "PP"),
    ("ngram", "preemption", "priority", "TP"),
    ("suffix", "chunked prefill", "prefix hit", "PP"),
    ("ngram", "prefix hit", "preemption", "priority", "PP"),
    ("suffix", "chunked prefill", "prefix hit", "preemption", "priority", "TP"),
    ("ngram", "chunked prefill", "prefix hit", "PP", "lanes"),
    ("suffix", "preemption", "priority", "TP", "lanes"),
    ("draft model", "chunked prefill", "prefix hit", "TP", "lanes"),
    ("draft model", "preemption", "priority", "PP"),
    ("eagle", "preemption", "priority", "TP", "lanes"),
    ("eagle", "chunked prefill", "prefix hit", "PP"),
]
VICTIMS = {"none": "", "rank": "worker", "engine": "engine"}


@dataclass(frozen=True)
class Ask:
    """A chat that asks for these."""

    number: int
    features: tuple[str, ...]

    def body(self, priority: bool) -> dict[str, Any]:
        more = {key: value for feature in self.features for key, value in ASKS[feature].items()}
        words = f"{TOPIC * 3}Write number {self.number} as JSON." if "grammar" in self.features else TOPIC * 3
        body = {
            "messages": [{"role": "user", "content": f"{words} ({self.number % 4})"}],
            "max_tokens": TOKENS, "temperature": 0, "return_token_ids": True, **more,
        }  # fmt: skip
        return {**body, "priority": self.number % 3} if priority else body


def asks() -> list[Ask]:
    alone = [(name,) for name in ASKS]
    pairs = [pair for pair in itertools.combinations(ASKS, 2) if frozenset(pair) not in APART]
    return [Ask(number, features) for number, features in enumerate([(), *alone, *pairs])]


async def answer(client: httpx2.AsyncClient, server: Server, ask: Ask, priority: bool) -> Any:
    """The tokens of all choices; of what is no answer its text."""
    response = await client.post(
        server.url + "/v1/chat/completions", json={"model": server.model, **ask.body(priority)}
    )
    if response.status_code != 200:
        return response.text
    choices = response.json()["choices"]
    return [(choice["token_ids"], choice["finish_reason"]) for choice in choices]


async def canary(client: httpx2.AsyncClient, server: Server, role: str) -> list[int]:
    """A stream; a third through, one process of this role is killed."""
    prompt, found = [5, 9, 2, 7] * 8, list[int]()
    async for choice in server.stream(client, server.body(prompt, TOKENS)):
        found += choice["token_ids"]
        if role and len(found) >= TOKENS // 3:
            os.kill(server.victims(role)[-1], signal.SIGKILL)
            role = ""
    return found


async def answers(server: Server, role: str, priority: bool) -> list[Any]:
    async with patient_client() as client:
        first, *rest = await asyncio.gather(
            canary(client, server, role), *(answer(client, server, ask, priority) for ask in asks())
        )
    return [first, *rest]


def preemptions(server: Server) -> float:
    lines = server.http.get(server.url + "/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:num_preemptions_total"))


def small(folder: Path) -> str:
    """A random model with experts, and beside it a model and a head that draft."""
    from tests.model.checkpoints import config_of, write_head, write_talker

    made = write_talker(folder / "small", "qwen3_moe", **EXPERTS)
    write_talker(folder / "small-draft")
    write_head(folder / "small-head", vocab_size=config_of(made)["vocab_size"])
    return str(made)


def options_of(features: tuple[str, ...], model: str) -> list[str]:
    few = LESS_MEMORY if SMALL & set(features) else OPTIONS["preemption"]
    words = [word for name in features for word in (few if name == "preemption" else OPTIONS[name])]
    return [word.replace("MODEL", model) for word in words]


def run(numbers: list[int], faults: list[str], models: dict[bool, str]) -> tuple[Counter[Any], Counter[Any], list[str]]:
    """By pair of features, or a feature and a fault: answers, and those with other tokens; and what there is to say."""
    given: Counter[Any] = Counter()
    wrong: Counter[Any] = Counter()
    notes = []
    plains: dict[bool, list[Any]] = {}
    for number in numbers:
        features = CONFIGS[number - 1]
        of_small = bool(SMALL & set(features))
        model = models[of_small]
        plain = plains[of_small] = plains.get(of_small) or plainly(model)
        with Server(model, *PLAIN, *TOOLS, *options_of(features, model)) as server:
            for fault in faults:
                found = asyncio.run(answers(server, VICTIMS[fault], "priority" in features))
                wait_healthy(server)
                different = 0
                for ask, one, two in zip([Ask(-1, ()), *asks()], plain, found, strict=True):
                    there = [*features, *ask.features]
                    pairs = [*itertools.combinations(there, 2), *((name, fault) for name in there)]
                    given.update(pairs)
                    if one != two:
                        different += 1
                        wrong.update(pairs)
                        print(f"{number} {fault} {there}:\n  {one}\n  {two}", file=sys.stderr)
                print(f"config {number} ({', '.join(features)}), {fault}: {len(found)} answers, {different} other")
            if "preemption" in features:
                notes.append(f"config {number}: {preemptions(server):.0f} preemptions in the engine's last process")
    return given, wrong, notes


def plainly(model: str) -> list[Any]:
    """The answers of one rank without any of these. Raises RuntimeError for one that is none."""
    with Server(model, *PLAIN, *TOOLS) as server:
        plain = asyncio.run(answers(server, "", False))
    for ask, said in zip(asks(), plain[1:], strict=True):
        if isinstance(said, str):
            raise RuntimeError(f"{ask.features} is refused: {said}")
    return plain


def table(given: Counter[Any], wrong: Counter[Any], faults: list[str]) -> report.Table:
    names = [name for name in (*OPTIONS, *ASKS) if any(name in pair for pair in given)]
    rows = []
    for name in names:
        row = [name]
        for other in [*names, *faults]:
            pair = next((p for p in ((name, other), (other, name)) if given[p]), None)
            row.append("" if pair is None else f"{given[pair]}" + (f" ({wrong[pair]})" if wrong[pair] else ""))
        rows.append(row)
    return report.Table("Answers in which both were there (of these with other tokens)", ["", *names, *faults], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--configs", default=",".join(str(n + 1) for n in range(len(CONFIGS))))
    parser.add_argument("--faults", default=",".join(VICTIMS))
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", type=Path)
    said = parser.parse_args()
    faults = said.faults.split(",")
    with tempfile.TemporaryDirectory() as folder:
        models = {False: said.model, True: small(Path(folder))}
        given, wrong, notes = run([int(n) for n in said.configs.split(",")], faults, models)
    made = table(given, wrong, faults)
    print(report.as_text([made], notes))
    if said.markdown:
        small_only = all(SMALL & set(CONFIGS[int(n) - 1]) for n in said.configs.split(","))
        part = "feature matrix of the small model" if small_only else "feature matrix"
        report.write_between(said.markdown, part, report.as_markdown([made], notes))
    if said.json:
        said.json.write_text(json.dumps({"given": [[*k, v] for k, v in given.items()], "notes": notes}, indent=1))
    return bool(sum(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
