"""`planaria bench`: one stream, many at once in process, or a server over HTTP. Prompts are random token ids."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

from planaria.cli.look import console, generating, loading, summary
from planaria.errors import EngineDead
from planaria.types import SamplingParams

SILENCE_LIMIT = 600.0  # seconds without a byte after which a request counts as failed


def spread(values: list[float], digits: int = 1) -> dict[str, float]:
    """Median, lowest and highest."""
    return {
        "median": round(statistics.median(values), digits), "low": round(min(values), digits),
        "high": round(max(values), digits),
    }  # fmt: skip


def show(title: str, result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(result) + "\n")
        return
    table = Table(title=title, box=None, title_justify="left")
    table.add_column("")
    table.add_column("median", justify="right")
    table.add_column("low - high", style="dim")
    for name, value in result.items():
        if isinstance(value, dict) and "median" in value:
            table.add_row(name, f"{value['median']:,}", f"{value['low']:,} - {value['high']:,}")
        elif not isinstance(value, dict):
            table.add_row(name, f"{value:,}" if isinstance(value, int | float) else str(value), "")
    console.print(table)


def params(output_len: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=output_len, min_tokens=output_len, temperature=0.0, ignore_eos=True, detokenize=False
    )  # fmt: skip


def random_prompt(source: random.Random, length: int, vocab_size: int) -> list[int]:
    return [source.randrange(min(100, vocab_size - 1), vocab_size) for _ in range(length)]


def engine_for(model: str, engine: dict[str, Any], as_json: bool) -> Any:
    """A loaded LLM without prefix hits between repetitions (prompts differ), its summary printed."""
    began = time.perf_counter()
    from planaria.llm import LLM

    with loading() as progress:
        llm = LLM(model, on_progress=progress, skip_tokenizer_init=True, **engine)
    if not as_json:
        console.print(summary(llm.facts, {"total": time.perf_counter() - began}))
    return llm


def latency(
    model: str, engine: dict[str, Any], *, input_len: int, output_len: int, repeat: int, as_json: bool
) -> None:
    """Time to first token and decode rate of one stream."""
    source = random.Random(engine["seed"] or 0)
    with engine_for(model, engine, as_json) as llm:
        vocab = llm.facts.vocab_size
        llm.generate([random_prompt(source, input_len, vocab)], params(8))
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
    with engine_for(model, engine, as_json) as llm:
        vocab = llm.facts.vocab_size
        llm.generate([random_prompt(source, 16, vocab)], params(2))
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


@dataclass
class Sample:
    """One request as the client saw it. Seconds."""

    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0
    error: str | None = None


async def _one(client: Any, url: str, body: dict[str, Any]) -> Sample:
    sample, since = Sample(), time.perf_counter()
    last = since
    try:
        async with client.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                sample.error = f"{answer.status_code}: {(await answer.aread()).decode(errors='replace')[:300]}"
                return sample
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                now = time.perf_counter()
                event = json.loads(line[6:])
                if "error" in event:
                    sample.error = event["error"]["message"]
                elif event["choices"]:
                    if not sample.ttft:
                        sample.ttft = now - since
                    else:
                        sample.gaps.append(now - last)
                    last = now
                if event.get("usage"):
                    sample.tokens = event["usage"]["completion_tokens"]
    except Exception as e:  # any failure of the transport is this request's result
        sample.error = f"{type(e).__name__}: {e}"
    sample.seconds = time.perf_counter() - since
    return sample


async def _drive(
    base_url: str, headers: dict[str, str], bodies: list[dict[str, Any]], concurrency: int, rate: float,
    source: random.Random, progress: Any,
) -> tuple[list[Sample], float]:  # fmt: skip
    import httpx2

    gate = asyncio.Semaphore(concurrency)
    limits = httpx2.Limits(max_connections=None)
    async with httpx2.AsyncClient(headers=headers, timeout=SILENCE_LIMIT, limits=limits) as client:
        done = 0

        async def one(body: dict[str, Any], delay: float) -> Sample:
            nonlocal done
            await asyncio.sleep(delay)
            async with gate:
                sample = await _one(client, f"{base_url}/v1/completions", body)
            done += 1
            progress(done, sample.tokens)
            return sample

        delay, tasks = 0.0, []
        since = time.perf_counter()
        for body in bodies:
            tasks.append(one(body, delay))
            delay += source.expovariate(rate) if rate else 0.0
        samples = await asyncio.gather(*tasks)
        return list(samples), time.perf_counter() - since


def percentile(values: list[float], q: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]


def serve(
    base_url: str, *, model: str | None, api_key: str | None, num_prompts: int, concurrency: int, request_rate: float,
    input_len: int, output_len: int, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Drive a running OpenAI server with streaming completions. Raises EngineDead when it can't be reached."""
    import httpx2

    base_url = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx2.get(f"{base_url}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        name = model or answer.json()["data"][0]["id"]
    except httpx2.HTTPError as e:
        raise EngineDead(f"no server answers at {base_url}: {e}") from None
    except (ValueError, LookupError, TypeError):
        raise EngineDead(f"what answers at {base_url}/v1/models is no OpenAI server") from None
    source = random.Random(seed)
    bodies = [
        {"model": name, "prompt": random_prompt(source, input_len, 30_000), "max_tokens": output_len,
         "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        for _ in range(num_prompts)
    ]  # fmt: skip
    with generating(num_prompts, show=not as_json) as progress:
        samples, seconds = asyncio.run(_drive(base_url, headers, bodies, concurrency, request_rate, source, progress))
    good = [s for s in samples if s.error is None]
    errors = [s.error for s in samples if s.error is not None]
    for error in sorted({e for e in errors if e})[:5]:
        console.print(f"error: {error}", markup=False)
    result: dict[str, Any] = {
        "requests": len(samples), "failed": len(errors), "seconds": round(seconds, 2),
        "requests_per_s": round(len(good) / seconds, 2),
        "output_tokens_per_s": round(sum(s.tokens for s in good) / seconds, 1),
    }  # fmt: skip
    if good:
        ttft, gaps = [1e3 * s.ttft for s in good], [1e3 * g for s in good for g in s.gaps]
        result |= {
            "ttft_ms": spread(ttft), "ttft_p99_ms": round(percentile(ttft, 0.99), 1),
            "inter_token_ms": spread(gaps) if gaps else None,
            "inter_token_p99_ms": round(percentile(gaps, 0.99), 1) if gaps else None,
            "request_s": spread([s.seconds for s in good], 2),
        }  # fmt: skip
    show("serve", result, as_json)
    if errors:
        raise EngineDead(f"{len(errors)} of {len(samples)} requests failed")
