"""`planaria bench serve` against a real server with the fake engine: all requests go out in time and are counted."""

from __future__ import annotations

import asyncio
import json

from planaria.cli import main
from tests.api.fake_engine import FakeEngine

TRACE = "".join(
    json.dumps({"timestamp": 40 * i, "input_length": 40 + i % 3, "output_length": 1 + i, "hash_ids": [1, 2, 3 + i % 3]})
    + "\n"
    for i in range(20)
)


async def bench(capsys, url, *options):
    code = await asyncio.to_thread(main, ["bench", "serve", "--base-url", url, "--json", *map(str, options)])
    out, err = capsys.readouterr()
    return code, json.loads(out) if out else None, err


async def test_a_trace_is_replayed(start, tokenizer, tmp_path, capsys):
    (tmp_path / "trace.jsonl").write_text(TRACE)
    engine = FakeEngine(tokenizer)
    async with start(engine) as server:
        code, result, _ = await bench(
            capsys, server.url, "--trace", tmp_path / "trace.jsonl", "--speed-up", 4, "--max-requests", 18,
            "--details", tmp_path / "details.jsonl",
        )  # fmt: skip
    assert result["errors"] == [] and code == 0 and result["failed"] == 0
    assert result["requests"] == 18 and result["seconds"] >= 17 * 0.040 / 4
    for name in ("ttft_ms", "tpot_ms", "inter_token_ms", "sent_late_ms", "request_s"):
        assert result[name]["low"] <= result[name]["median"] <= result[name]["p90"] <= result[name]["p99"], name
    sent = sorted(engine.submitted, key=lambda message: message.max_tokens)
    assert [message.max_tokens for message in sent] == list(range(1, 19))
    assert [len(message.prompt) for message in sent] == [40 + i % 3 for i in range(18)]
    assert len({tuple(message.prompt[:32]) for message in sent}) == 1  # two blocks of 16 that all share
    assert len({tuple(message.prompt[32:40]) for message in sent}) == 3
    lines = [json.loads(line) for line in (tmp_path / "details.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == list(range(1, 19))
    assert all(line["late"] >= 0 and line["error"] is None and line["ttft"] > 0 for line in lines)


async def test_details_that_can_not_be_written_are_said_first(start, tokenizer, tmp_path, capsys):
    """When all had been measured it was lost."""
    engine = FakeEngine(tokenizer)
    async with start(engine) as server:
        code, result, err = await bench(capsys, server.url, "--details", tmp_path / "none" / "details.jsonl")
    assert (code, result, engine.submitted) == (2, None, []) and "--details" in err and "can't be written" in err


async def test_the_loop_is_open(start, tokenizer, tmp_path, capsys):
    """Requests go out while none is answered."""
    (tmp_path / "trace.csv").write_text("timestamp,context_tokens,generated_tokens\n" + "1.0,10,3\n" * 50)
    engine = FakeEngine(tokenizer)
    engine.gate.clear()
    async with start(engine) as server:
        task = asyncio.create_task(bench(capsys, server.url, "--trace", tmp_path / "trace.csv"))
        async with asyncio.timeout(60):
            while len(engine.submitted) < 50:
                await asyncio.sleep(0.01)
        engine.gate.set()
        code, result, _ = await task
    assert code == 0 and result["requests"] == 50 and result["failed"] == 0


async def test_what_fails_is_named_and_the_rest_counted(start, tmp_path, capsys):
    (tmp_path / "trace.csv").write_text("timestamp,context_tokens,generated_tokens\n0,10,3\n0,5000,3\n0,10,4\n")
    async with start() as server:
        code, result, err = await bench(capsys, server.url, "--trace", tmp_path / "trace.csv")
    assert code == 1 and "1 of 3 requests failed" in err
    assert result["failed"] == 1 and result["ttft_ms"]["median"] > 0
    (error,) = result["errors"]
    assert error["request"] == 1 and error["error"].startswith("400: prompt has 5000 tokens")
    assert f"error: {error['error']}" in err.splitlines()


async def test_made_up_requests(start, tokenizer, capsys):
    engine = FakeEngine(tokenizer)
    async with start(engine) as server:
        code, result, _ = await bench(
            capsys, server.url, "--num-prompts", 10, "--concurrency", 2, "--input-len", 7, "--output-len", 5
        )
    assert code == 0 and result["requests"] == 10
    assert {(len(message.prompt), message.max_tokens) for message in engine.submitted} == {(7, 5)}


async def test_a_bad_trace_is_one_line(tmp_path, capsys):
    (tmp_path / "trace.csv").write_text("timestamp,context_tokens,generated_tokens\n0,10,3\n0,ten,3\n")
    code, _, err = await bench(capsys, "http://127.0.0.1:9", "--trace", tmp_path / "trace.csv")
    assert code == 2 and "line 3: 'ten' is no number of tokens" in err and len(err.splitlines()) == 1
