"""What a request costs: dear work is done once, beside the event loop, and not for who has left."""

from __future__ import annotations

import asyncio
import copy
import json
import threading
from types import SimpleNamespace

import pytest

from planaria.errors import RequestError
from planaria.server import chat, completions, inputs
from planaria.server.common import prompt_logprobs_json
from planaria.server.completions import CompletionWriter
from planaria.server.config import ServerConfig
from planaria.server.inputs import submissions
from planaria.server.schema import CompletionRequest
from planaria.server.service import Service
from planaria.server.stream import Choices
from planaria.types import Delta, FinishReason, SamplingParams, TokenLogprobs
from tests.api.conftest import running
from tests.api.fake_engine import FakeEngine, facts

IDS = [5, 6, 7]
POSITIONS = [None, TokenLogprobs(6, -1.0, 1, ((6, -1.0),)), TokenLogprobs(7, -2.0, 2, ((8, -0.5),))]
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": [IDS, [9, 9]], "prompt_logprobs": 1}),
        ("/v1/completions", {"prompt": [IDS, [9, 9]], "logprobs": 1, "echo": True}),
        ("/v1/chat/completions", {"messages": MESSAGES, "prompt_logprobs": 1}),
    ],
)
async def test_log_probabilities_of_a_prompt_are_asked_for_once(server, monkeypatch, path, fields, stream):
    """By the first choice of each prompt; and are written in a thread."""
    threads = set()

    def written(*args):
        threads.add(threading.current_thread().name)
        return prompt_logprobs_json(*args)

    monkeypatch.setattr(completions, "prompt_logprobs_json", written)
    monkeypatch.setattr(chat, "prompt_logprobs_json", written)
    async with server.http() as http:
        answer = await http.post(path, json={"n": 3, "max_tokens": 2, "stream": stream, **fields})
    assert answer.status_code == 200, answer.text
    prompts = 2 if "prompt" in fields else 1
    asked = [submit.params.prompt_logprobs for submit in server.engine.submitted]
    assert asked == [1, None, None] * prompts
    assert all("text" in name for name in threads) and bool(threads) == ("prompt_logprobs" in fields)


def test_choices_that_come_before_the_first_wait_for_the_prompts_part(tokenizer):
    params = SamplingParams(n=2, prompt_logprobs=1, max_tokens=2)
    submits = submissions("r", IDS, params, facts(), eos_ids=(2,), tokenizer=tokenizer)
    stream = Choices(IDS, submits, tokenizer)
    body = CompletionRequest(prompt=IDS, n=2, prompt_logprobs=1)
    service = Service(FakeEngine(tokenizer), tokenizer, ServerConfig())
    writer = CompletionWriter(service, "1", body, [stream], None, False)
    assert writer.event(stream.take(Delta("r-1", 0, [9]))) == b""
    assert writer.event(stream.take(Delta("r-1", 1, [9], FinishReason.LENGTH))) == b""
    event = writer.event(stream.take(Delta("r-0", 0, [9], prompt_logprobs=POSITIONS)))
    choices = [json.loads(line[6:])["choices"][0] for line in event().decode().split("\n\n") if line]
    assert [c["index"] for c in choices] == [1, 1, 0] and choices[1]["finish_reason"] == "length"
    assert choices[0]["prompt_logprobs"] == choices[2]["prompt_logprobs"] and choices[0]["prompt_logprobs"][1]["6"]
    assert "prompt_logprobs" not in choices[1]
    service.close()


async def test_bad_words_are_spelled_once(server, monkeypatch):
    words = [f"word{i}" for i in range(50)]
    seen = []
    real = inputs.spell_bad_words

    def spelled(params, tokenizer):
        if params.bad_words:
            seen.append(threading.current_thread().name)
        return real(params, tokenizer)

    monkeypatch.setattr("planaria.server.common.spell_bad_words", spelled)
    monkeypatch.setattr(inputs, "spell_bad_words", spelled)
    async with server.http() as http:
        body = {"prompt": [IDS, [8, 9]], "n": 2, "max_tokens": 1, "bad_words": words}
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert len(seen) == 1 and "text" in seen[0]
    assert len({submit.params.bad_words_ids for submit in server.engine.submitted}) == 1


async def test_many_tokens_are_looked_at_and_become_text_beside_the_event_loop(server, monkeypatch):
    threads = set()

    def checked(*args):
        threads.add(threading.current_thread().name)
        return inputs.check_vocabulary(*args)

    monkeypatch.setattr("planaria.server.tokens.check_vocabulary", checked)
    async with server.http() as http:
        answer = await http.post("/detokenize", json={"tokens": [5] * 3000})
        assert answer.status_code == 200 and len(threads) == 1 and all("text" in name for name in threads)
        answer = await http.post("/detokenize", json={"tokens": [5] * 70_000 + [10**6]})
        assert answer.status_code == 400 and "token id 1000000" in answer.text


async def test_how_long_a_token_may_be_is_found_out_when_a_text_may_be_too_long(tokenizer):
    """All of the vocabulary is looked at for it, beside the event loop, and no start waits for that."""
    fresh, threads = copy.copy(tokenizer), []
    vars(fresh).pop("longest_token", None)
    look = fresh.backend.get_vocab_size

    def counted():
        threads.append(threading.current_thread().name)
        return look()

    backend = tokenizer.backend
    fresh.backend = SimpleNamespace(
        get_vocab_size=counted, id_to_token=backend.id_to_token, normalizer=backend.normalizer
    )
    async with running(FakeEngine(tokenizer), fresh, eos_ids=(2,)) as server, server.http() as http:
        assert not threads and not fresh.measured
        answer = await http.post("/v1/completions", json={"prompt": "x" * 200_000, "max_tokens": 1})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    assert len(threads) == 1 and "text" in threads[0]
    assert fresh.longest_token == tokenizer.longest_token > 10


async def test_work_for_who_has_left_is_not_done(tokenizer):
    """It waits behind other work when its client goes."""
    service = Service(FakeEngine(tokenizer), tokenizer, ServerConfig())
    free, done = threading.Event(), []
    left: asyncio.Queue = asyncio.Queue()
    first = asyncio.create_task(service.in_thread(free.wait))
    second = asyncio.create_task(service.in_thread(lambda: done.append(2), left.get))
    third = asyncio.create_task(service.in_thread(lambda: done.append(3), asyncio.Queue().get))
    await left.put({"type": "http.disconnect"})
    with pytest.raises(RequestError, match="gone"):
        await second
    free.set()
    await first
    await third
    assert done == [3]
    service.close()


async def test_texts_are_tokenised_some_at_a_time(tokenizer, monkeypatch):
    """So that each part can be left out once the client is gone, and none is long."""
    service = Service(FakeEngine(tokenizer), tokenizer, ServerConfig())
    parts = []
    real = service.in_thread

    async def in_thread(work, gone=None):
        found = await real(work, gone)
        parts.append(len(found))
        return found

    monkeypatch.setattr(service, "in_thread", in_thread)
    texts = ["ab " * 10_000] * 5
    ids = await service.encode(texts, False, asyncio.Queue().get)
    assert parts == [2, 2, 1] and ids == [tokenizer.encode(texts[0])] * 5
    service.close()


async def test_all_bodies_together_are_bounded(start, monkeypatch):
    monkeypatch.setattr("planaria.server.gate.MAX_BODIES", 10_000)
    async with start() as server, server.http() as http:
        server.engine.gate.clear()
        long = {"prompt": [5] * 400, "user": "x" * 5000, "max_tokens": 1}
        first = asyncio.create_task(http.post("/v1/completions", json=long))
        await server.engine.until(lambda: server.engine.submitted)
        answer = await http.post("/v1/completions", json=long)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "overloaded"
        server.engine.gate.set()
        assert (await first).status_code == 200
        assert (await http.post("/v1/completions", json=long)).status_code == 200  # all was given back
