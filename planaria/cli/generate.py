"""`planaria generate`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import typer

from planaria.cli.look import console, generating, started, write_json
from planaria.env import outer_launcher
from planaria.errors import ConfigError
from planaria.types import SamplingParams


def parse_ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        ids = []
    if not ids:
        raise ConfigError("--prompt-token-ids", repr(text), "is not a list of token ids", "write 1,2,3")
    return ids


def read_prompts(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError("--prompt-file", path, f"can't be read: {e}") from None
    return [line for line in text.split("\n") if line]  # others' ends of lines are part of a text


def run(
    model: str, engine: dict[str, Any], prompts: list[str] | None, prompt: list[str] | None,
    prompt_token_ids: list[str] | None, prompt_file: Path | None, skip_tokenizer_init: bool, as_json: bool,
    **sampling: Any,
) -> None:  # fmt: skip
    """Exit code 1 when a request ended with an error. Of several answers each says what it is one to.

    Under an outer launcher every process comes here; the one with RANK 0 prints. Of several engines each has a part of
    the prompts, which the first of its processes prints.
    """
    params = SamplingParams(detokenize=not skip_tokenizer_init, **sampling)
    texts = [*(prompts or ()), *(prompt or ()), *read_prompts(prompt_file)]
    batch: list[str | list[int]] = [*texts, *map(parse_ids, prompt_token_ids or ())]
    if not batch:
        raise ConfigError(
            "--prompt", "", "none was given", "give a text after MODEL, --prompt-token-ids or --prompt-file"
        )
    if skip_tokenizer_init and texts:
        raise ConfigError(
            "--skip-tokenizer-init", "", "there is no tokenizer for --prompt", "give --prompt-token-ids 1,2,3"
        )
    params.verify()
    outer = outer_launcher() if engine["distributed_executor_backend"] == "external_launcher" else None
    prints = outer is None or outer.rank == 0
    shown = prints and not as_json
    with started("LLM", model, bar=prints, show=shown, skip_tokenizer_init=skip_tokenizer_init, **engine) as llm:
        facts, since, own = llm.facts, time.perf_counter(), llm.config.parallel.outer
        numbers = range(len(batch)) if own is None else range(own.replica, len(batch), own.replicas)
        prints = own is None or own.own_prompts or own.rank == 0
        with generating(len(numbers), show=shown) as progress:
            outputs = llm.generate([batch[number] for number in numbers], params, on_tokens=progress)
        seconds = time.perf_counter() - since
    failed = any(choice.finish_reason == "error" for output in outputs for choice in output.outputs)
    count = 0
    several = len(batch) * params.n > 1
    for index, output in zip(numbers, outputs, strict=True) if prints else ():
        for choice in output.outputs:
            count += len(choice.token_ids)
            if as_json:
                line: dict[str, Any] = {
                    "index": index, "choice": choice.index, "prompt": output.prompt,
                    "text": choice.text, "token_ids": choice.token_ids, "finish_reason": choice.finish_reason,
                    "executor": facts.executor, "link": facts.link, "layout": facts.layout, "ranks": facts.ranks,
                    "rearrangements": llm.stats.experts.rearrangements if llm.stats.experts is not None else 0,
                }  # fmt: skip
                if choice.logprobs is not None:
                    line["logprobs"] = [
                        {"token": p.token, "logprob": p.logprob, "rank": p.rank,
                         "top": [{"token": token, "logprob": logprob} for token, logprob in p.top]}
                        for p in choice.logprobs
                    ]  # fmt: skip
                if choice.error:
                    line["error"] = choice.error
                write_json(line)
                continue
            if several:
                which = f", choice {choice.index + 1} of {params.n}" if params.n > 1 else ""
                said = output.prompt or " ".join(map(str, output.prompt_token_ids))
                sys.stdout.write(f"# {index + 1} of {len(batch)}{which}: {' '.join(said.split())[:100]}\n")
            elif isinstance(output.prompt, str):
                console.print(output.prompt, style="dim", end="", soft_wrap=True)
            sys.stderr.flush()
            text = choice.text if params.detokenize else " ".join(map(str, choice.token_ids))
            sys.stdout.write(text + "\n")
            sys.stdout.flush()
            if choice.error:
                console.print(f"error: {choice.error}")
    if shown:
        console.print(f"{count} tokens in {seconds:.2f} s, {count / seconds:,.1f} tok/s", style="dim")
    if failed:
        raise typer.Exit(1)
