"""`planaria bench latency` and `throughput`: one stream, or many at once, in process. Prompts are random token ids."""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from rich.table import Table

from planaria.cli.look import console, generating, started, write_json
from planaria.types import SamplingParams


def spread(values: list[float], digits: int = 1) -> dict[str, float]:
    """Median, lowest and highest."""
    return {
        "median": round(statistics.median(values), digits), "low": round(min(values), digits),
        "high": round(max(values), digits),
    }  # fmt: skip


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def show(title: str, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        write_json(result)
        return
    table = Table(title=title, box=None, title_justify="left")
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column("low - high", style="dim")
    table.add_column("p90, p99" if any("p99" in value for value in result.values() if isinstance(value, dict)) else "")
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            tail = f"{value['p90']:,}, {value['p99']:,}" if "p99" in value else ""
            table.add_row(name, f"{value['median']:,}", f"{value['low']:,} - {value['high']:,}", tail)
        elif not isinstance(value, dict | list):
            table.add_row(name, f"{value:,}" if isinstance(value, int | float) else str(value), "")
    console.print(table)


def params(output_len: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=output_len, min_tokens=output_len, temperature=0.0, ignore_eos=True, detokenize=False
    )  # fmt: skip


def random_prompt(source: random.Random, length: int, vocab_size: int) -> list[int]:
    return [source.randrange(min(100, vocab_size - 1), vocab_size) for _ in range(length)]


def latency(model: str, engine: dict[str, Any], *, input_len: int, output_len: int, repeat: int, as_json: bool) -> None:
    """Time to first token and decode rate of one stream."""
    source = random.Random(engine["seed"] or 0)
    with started("LLM", model, show=not as_json, skip_tokenizer_init=True, **engine) as llm:
        vocab = llm.facts.vocab_size
        llm.generate([random_prompt(source, input_len, vocab)], params(min(8, output_len)), use_tqdm=False)
        first, rate = [], []
        with generating(repeat, show=not as_json) as progress:
            for done in range(1, repeat + 1):
                stamps: list[float] = []
                since = time.perf_counter()
                llm.generate(
                    [random_prompt(source, input_len, vocab)], params(output_len),
                    on_tokens=lambda _, tokens, s=stamps: s.append(time.perf_counter()) if tokens else None,
                )  # fmt: skip
                first.append(1e3 * (stamps[0] - since))
                if len(stamps) > 1:
                    rate.append((len(stamps) - 1) / (stamps[-1] - stamps[0]))
                progress(done, output_len)
        result: dict[str, Any] = {
            "input_len": input_len, "output_len": output_len, "ttft_ms": spread(first),
            "decode_tokens_per_s": spread(rate) if rate else None, "weights": llm.facts.quantization,
            "dtype": llm.facts.dtype, "threads": llm.facts.threads,
        }  # fmt: skip
    show("latency", result, as_json)


def throughput(
    model: str, engine: dict[str, Any], *, num_prompts: int, input_len: int, output_len: int, repeat: int, as_json: bool
) -> None:
    """Output tokens per second with `num_prompts` requests admitted together."""
    source = random.Random(engine["seed"] or 0)
    with started("LLM", model, show=not as_json, skip_tokenizer_init=True, **engine) as llm:
        vocab = llm.facts.vocab_size
        llm.generate([random_prompt(source, min(16, input_len), vocab)], params(min(2, output_len)), use_tqdm=False)
        rates = []
        for _ in range(repeat):
            prompts = [random_prompt(source, input_len, vocab) for _ in range(num_prompts)]
            since = time.perf_counter()
            with generating(num_prompts, show=not as_json) as progress:
                llm.generate(prompts, params(output_len), on_tokens=progress)
            rates.append(num_prompts * output_len / (time.perf_counter() - since))
        result: dict[str, Any] = {
            "num_prompts": num_prompts, "input_len": input_len, "output_len": output_len,
            "output_tokens_per_s": spread(rates),
            "total_tokens_per_s": spread([rate * (input_len + output_len) / output_len for rate in rates]),
            "weights": llm.facts.quantization, "dtype": llm.facts.dtype, "threads": llm.facts.threads,
        }  # fmt: skip
    show("throughput", result, as_json)
