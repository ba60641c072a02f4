"""`planaria bench serve`: drive a running OpenAI server with streaming completions, made up or after a trace.

Requests go out at times set beforehand, whatever the server does (an open loop), unless the number of open ones is
limited: then some wait here for a place, which is not counted. Bodies are made before the clock starts. How late this
program was is measured too: what it could not send in time says nothing about the server.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from planaria.cli.bench import percentile, show, spread
from planaria.cli.look import console, generating
from planaria.cli.traces import Trace, TracedRequest, TracePrompts, read_trace
from planaria.errors import ConfigError, EngineDead

SILENCE_LIMIT = 600.0  # seconds without a byte after which a request counts as failed
IDS = (100, 30_000)  # token ids of prompts: in every usual vocabulary, and not special
FAILED = ("abort", "error")  # finish reasons


@dataclass
class ClientTiming:
    """One request as the client saw it. Seconds; `late`: after its planned time."""

    late: float = 0.0
    ttft: float = 0.0
    gaps: list[float] = field(default_factory=list)  # between pieces
    seconds: float = 0.0
    tokens: int = 0
    error: str | None = None


def run(
    base_url: str, *, model: str | None, api_key: str | None, num_prompts: int, concurrency: int | None,
    request_rate: float, input_len: int, output_len: int, trace: Path | None, speed_up: float, length_scale: float,
    max_requests: int | None, seconds: float | None, details: Path | None, seed: int, as_json: bool,
) -> None:  # fmt: skip
    """Raises ConfigError for a bad trace, or details that can't be written, EngineDead when the server can't be reached
    or a request failed."""
    if details is not None:
        try:
            details.touch()
        except OSError as e:
            raise ConfigError("--details", details, f"can't be written ({e.strerror})", "give another file") from None
    if trace is None:
        work = made_up(num_prompts, request_rate, input_len, output_len, seed)
        concurrency = concurrency or 32
    else:
        work = read_trace(trace, max_requests)
    work = replayed(work, speed_up, length_scale, seconds)
    base_url = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    name = model or served_model(base_url, headers)
    prompts = TracePrompts(work.block_len, seed, *IDS)
    planned = [(a.at, body(name, prompts.tokens(a), a.output_len)) for a in work.arrivals]
    with generating(len(planned), show=not as_json) as progress:
        samples, took = asyncio.run(drive(base_url, headers, planned, concurrency, progress))
    if details is not None:
        write_details(details, work.arrivals, samples)
    errors = Counter(s.error for s in samples if s.error is not None)
    for error, count in errors.most_common(5):
        console.print(f"error: {error}" + (f" ({count} times)" if count > 1 else ""), soft_wrap=True)
    show("serve", figures(work.arrivals, samples, took), as_json)
    if errors:
        raise EngineDead(f"{errors.total()} of {len(samples)} requests failed")


def made_up(count: int, rate: float, input_len: int, output_len: int, seed: int) -> Trace:
    """`rate` requests a second (Poisson), or (0) all at once."""
    source = random.Random(seed)
    gaps = (source.expovariate(rate) if rate else 0.0 for _ in range(count - 1))
    return Trace([TracedRequest(at, input_len, output_len) for at in itertools.accumulate(gaps, initial=0.0)], 1)


def replayed(trace: Trace, speed_up: float, length_scale: float, seconds: float | None) -> Trace:
    """Times over `speed_up`, lengths times `length_scale`; what comes after so many `seconds` (then) is left out."""
    scaled = trace.scaled(length_scale)
    arrivals = [arrival._replace(at=arrival.at / speed_up) for arrival in scaled.arrivals]
    return Trace([a for a in arrivals if seconds is None or a.at < seconds], scaled.block_len)


def served_model(base_url: str, headers: dict[str, str]) -> str:
    import httpx2

    try:
        answer = httpx2.get(f"{base_url}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx2.HTTPError as e:
        raise EngineDead(f"no server answers at {base_url}: {e}") from None
    except (ValueError, LookupError, TypeError):
        raise EngineDead(f"what answers at {base_url}/v1/models is no OpenAI server") from None


def body(model: str, prompt: list[int], output_len: int) -> bytes:
    fields = {
        "model": model, "prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    return json.dumps(fields, separators=(",", ":")).encode()


async def drive(
    base_url: str, headers: dict[str, str], planned: list[tuple[float, bytes]], concurrency: int | None, progress: Any
) -> tuple[list[ClientTiming], float]:
    """Samples in the order of `planned`, and seconds in all. `concurrency`: most open at a time; None: any number."""
    import httpx2

    gate = asyncio.Semaphore(concurrency or len(planned))
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {**headers, "Content-Type": "application/json"}
    done = 0

    async def one(client: Any, at: float, content: bytes) -> ClientTiming:
        nonlocal done
        sample = ClientTiming()
        sample.late = time.perf_counter() - since - at
        async with gate:
            await ask(client, f"{base_url}/v1/completions", content, sample)
        done += 1
        progress(done, sample.tokens)
        return sample

    async with httpx2.AsyncClient(headers=headers, timeout=SILENCE_LIMIT, limits=limits) as client:
        tasks = []
        since = time.perf_counter()
        for at, content in planned:
            wait = since + at - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(one(client, at, content)))
        return list(await asyncio.gather(*tasks)), time.perf_counter() - since


async def ask(
    client: Any, url: str, content: bytes, sample: ClientTiming, on_text: Callable[[str], object] = lambda text: None
) -> None:
    """One streaming request, into `sample`; its text to `on_text` as it comes."""
    last = since = time.perf_counter()
    ended = False
    try:
        async with client.stream("POST", url, content=content) as answer:
            if answer.status_code != 200:
                sample.error = f"{answer.status_code}: {_reason(await answer.aread())}"
                return
            async for line in _lines(answer):
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]":
                    ended = True
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
                    choice = event["choices"][0]
                    on_text(choice.get("text") or choice.get("delta", {}).get("content") or "")
                    if choice.get("finish_reason") in FAILED:
                        sample.error = f"ended with {choice['finish_reason']}"
                if event.get("usage"):
                    sample.tokens = event["usage"]["completion_tokens"]
        if not ended and sample.error is None:
            sample.error = "the stream broke off"
    except Exception as e:  # any failure of the transport is this request's result
        sample.error = f"{type(e).__name__}: {e}"
    finally:
        sample.seconds = time.perf_counter() - since


def _reason(content: bytes) -> str:
    """The message of an error in OpenAI's form, or the text as it is."""
    try:
        return str(json.loads(content)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return content.decode(errors="replace")[:300]


async def _lines(answer: Any) -> AsyncIterator[bytes]:
    """Whole lines. Only a newline ends one: a text may have what Unicode calls a line separator."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line.rstrip(b"\r")


def figures(arrivals: list[TracedRequest], samples: list[ClientTiming], took: float) -> dict[str, Any]:
    """What is shown. `tpot`: a request's seconds per token after its first; `inter_token`: every gap between pieces."""
    good = [(a, s) for a, s in zip(arrivals, samples, strict=True) if s.error is None]
    failed = [{"request": i, "error": s.error} for i, s in enumerate(samples) if s.error is not None]
    late = [1e3 * s.late for s in samples]
    result: dict[str, Any] = {
        "requests": len(samples), "failed": len(failed), "seconds": round(took, 2),
        "requests_per_s": round(len(good) / took, 2),
        "input_tokens_per_s": round(sum(a.input_len for a, _ in good) / took, 1),
        "output_tokens_per_s": round(sum(s.tokens for _, s in good) / took, 1),
        "sent_late_ms": _with_tail(late),
    }  # fmt: skip
    if good:
        per_token = [1e3 * sum(s.gaps) / (s.tokens - 1) for _, s in good if s.tokens > 1]
        gaps = [1e3 * gap for _, s in good for gap in s.gaps]
        result |= {
            "ttft_ms": _with_tail([1e3 * s.ttft for _, s in good]),
            "tpot_ms": _with_tail(per_token) if per_token else None,
            "inter_token_ms": _with_tail(gaps) if gaps else None,
            "request_s": _with_tail([s.seconds for _, s in good], 2),
        }
    return result | {"errors": failed}


def _with_tail(values: list[float], digits: int = 1) -> dict[str, float]:
    return spread(values, digits) | {
        "p90": round(percentile(values, 0.9), digits),
        "p99": round(percentile(values, 0.99), digits),
    }


def write_details(path: Path, arrivals: list[TracedRequest], samples: list[ClientTiming]) -> None:
    """A line of JSON for each request."""
    with path.open("w", encoding="utf-8") as file:
        for arrival, sample in zip(arrivals, samples, strict=True):
            line = {"at": arrival.at, "input_len": arrival.input_len, "output_len": arrival.output_len}
            file.write(json.dumps(line | asdict(sample)) + "\n")
