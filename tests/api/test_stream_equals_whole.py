"""A stream, put together, is the answer without streaming, whatever the options; and has one event a step."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planaria.server.app import create_app
from planaria.server.config import ServerConfig
from planaria.server.tools import Parsers
from tests.api.fake_engine import FakeEngine

STOPS = ["STOP", " the", "é", "🙂", "\n", "日", " quick brown", "zzz", ". ", "fox.", "now"]


def maybe(values):
    return st.one_of(st.none(), values)


COMMON = {
    "n": maybe(st.integers(1, 3)),
    "max_tokens": st.integers(1, 60),
    "min_tokens": maybe(st.just(1)),
    "temperature": maybe(st.sampled_from([0, 0.7, 1.3])),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": maybe(st.one_of(st.sampled_from(STOPS), st.lists(st.sampled_from(STOPS), max_size=4))),
    "include_stop_str_in_output": maybe(st.booleans()),
    "ignore_eos": maybe(st.booleans()),
    "skip_special_tokens": maybe(st.booleans()),
    "prompt_logprobs": maybe(st.integers(0, 3)),
    "return_token_ids": maybe(st.booleans()),
    "stop_by_id": st.booleans(),
}
COMPLETION = st.fixed_dictionaries(
    COMMON
    | {
        "prompt": st.sampled_from(["Hello", "Grüße 🙂", ["One", "Two words"], [1, 2, 3, 400], [[5, 6], [7]]]),
        "echo": maybe(st.booleans()),
        "logprobs": maybe(st.integers(0, 4)),
    }
)
CHAT = st.fixed_dictionaries(
    COMMON
    | {
        "messages": st.just([{"role": "user", "content": "Tell me 🙂"}]),
        "logprobs": st.just(True),
        "top_logprobs": maybe(st.integers(0, 4)),
    }
) | st.fixed_dictionaries(COMMON | {"messages": st.just([{"role": "user", "content": "Hi"}])})


class Harness:
    """The application without sockets, and a loop to run it in."""

    def __init__(self, tokenizer, **options) -> None:
        self.tokenizer = tokenizer
        self.runner = asyncio.Runner()
        self.engine = FakeEngine(tokenizer)
        app = create_app(self.engine, tokenizer, ServerConfig(**options))
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    def both(self, path, body):
        return self.runner.run(self._both(path, body))

    async def _both(self, path, body):
        # Once before: from then on the fake's prefix cache answers alike.
        await self.http.post(path, json=body | {"max_tokens": 1, "min_tokens": None})
        whole = await self.http.post(path, json=body)
        before = len(self.engine.submitted)
        streamed = await self.http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
        assert whole.status_code == streamed.status_code == 200, (whole.text, streamed.text)
        assert not self.engine.open
        return whole.json(), events(streamed), self.engine.submitted[before:]

    def close(self) -> None:
        self.runner.run(self.engine.close())
        self.runner.close()


@pytest.fixture(scope="module")
def harness(tokenizer):
    h = Harness(tokenizer)
    yield h
    h.close()


@pytest.fixture(scope="module")
def reasoner(tokenizer):
    h = Harness(tokenizer, parsers=Parsers(reasoning_parser="deepseek_r1"))
    yield h
    h.close()


def events(answer) -> list[dict]:
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.content.decode().split("\n\n")
    assert blocks.pop() == "" and blocks.pop() == "data: [DONE]"
    assert all(b.startswith("data: {") and "\n" not in b for b in blocks)
    return [json.loads(b[6:]) for b in blocks]


def request_of(options, tokenizer):
    body = {k: v for k, v in options.items() if v is not None}
    if body.pop("stop_by_id"):
        body["stop_token_ids"] = [tokenizer.encode(" Paris")[0], tokenizer.encode(" a")[0]]
    return body


def put_together(chunks, chat):
    """The choices of the whole answer, from the stream's; and each one's number of events with tokens."""
    choices, counts = {}, {}
    for chunk in chunks:
        for c in chunk["choices"]:
            known = choices.setdefault(c["index"], {"index": c["index"], "logprobs": None, "finish_reason": None})
            assert known["finish_reason"] is None, "an event after the end"
            if chat:
                delta = c.pop("delta")
                if "role" in delta:
                    assert "message" not in known and delta["content"] == ""
                    known["message"] = {"role": delta["role"], "content": "", "refusal": None}
                    known["first"] = True
                    continue
                known["message"]["content"] += delta.pop("content", "")
                for name, text in delta.items():
                    known["message"][name] = known["message"].get(name, "") + text
            else:
                known["text"] = known.get("text", "") + c.pop("text")
            counts[c["index"]] = counts.get(c["index"], 0) + 1
            for name, value in c.items():
                if name == "token_ids":
                    known.setdefault(name, []).extend(value)
                elif name == "logprobs" and value is not None:
                    known[name] = {k: (known[name] or {}).get(k, []) + v for k, v in value.items()}
                elif name != "logprobs":
                    known[name] = value
    for c in choices.values():
        c.pop("first", None)
    return [choices[i] for i in sorted(choices)], counts


EXAMPLES = settings(
    max_examples=150, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@EXAMPLES
@given(options=COMPLETION)
def test_completions(harness, options):
    body = request_of(options, harness.tokenizer)
    whole, chunks, _ = harness.both("/v1/completions", body)
    choices, counts = put_together(chunks[:-1], chat=False)
    assert choices == whole["choices"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert all(c["usage"] is None and len(c["choices"]) == 1 for c in chunks[:-1])
    assert sum(counts.values()) == whole["usage"]["completion_tokens"]  # the fake gives one token a step
    for choice in whole["choices"]:
        check_text(harness, body, choice, choice["text"], whole, len(whole["choices"]))


@EXAMPLES
@given(options=CHAT)
def test_chat(harness, options):
    body = request_of(options, harness.tokenizer)
    whole, chunks, _ = harness.both("/v1/chat/completions", body)
    choices, counts = put_together(chunks[:-1], chat=True)
    assert choices == whole["choices"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
    assert sum(counts.values()) == whole["usage"]["completion_tokens"]
    for name in ("prompt_logprobs", "prompt_token_ids"):
        assert [c[name] for c in chunks if name in c] == ([whole[name]] if name in whole else [])
    for choice in whole["choices"]:
        check_text(harness, body, choice, choice["message"]["content"], whole, len(whole["choices"]))
        if choice["logprobs"] is not None:
            top = body.get("top_logprobs", 0)
            assert all(len(p["top_logprobs"]) == top for p in choice["logprobs"]["content"])


@settings(EXAMPLES, max_examples=30)
@given(options=CHAT)
def test_chat_whose_reasoning_is_told_apart(reasoner, options):
    body = request_of(options | {"return_token_ids": True}, reasoner.tokenizer)
    whole, chunks, _ = reasoner.both("/v1/chat/completions", body)
    choices, counts = put_together(chunks[:-1], chat=True)
    for choice in choices:
        for name in ("reasoning", "reasoning_content"):
            choice["message"].setdefault(name, None)
    assert choices == whole["choices"] and chunks[-1]["usage"] == whole["usage"]
    assert sum(counts.values()) >= whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        message = choice["message"]
        assert message["content"] == "" and message["reasoning"] == message["reasoning_content"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}, {"logprobs": 1}])
@pytest.mark.parametrize("reads", [False, True])
def test_each_token_says_whose_it_is(harness, reasoner, path, more, reads):
    """Nothing before weights are changed, then with each piece; and all of it at the end."""
    chat, used = "chat" in path, reasoner if reads else harness
    asked = {"messages": [{"role": "user", "content": "Hi"}]} if chat else {"prompt": "Hi"}
    if chat and "logprobs" in more:
        more = {"logprobs": True}
    versions = [0, 0, 0, 1, 1, 4, 4, 4]
    used.engine.weights = versions.__getitem__
    try:
        whole, chunks, _ = used.both(path, asked | more | {"max_tokens": 8, "ignore_eos": True, "temperature": 0})
    finally:
        used.engine.weights = lambda index: 0
    pieces = [c for chunk in chunks for c in chunk["choices"] if not chat or "role" not in c["delta"]]
    *before, last = pieces
    said = [c.get("weights_version", 0) for c in pieces if not reads or not chat or "weights_version" in c]
    assert said == (versions if not reads or not chat else versions[3:]), said
    assert not any("weights_versions" in c for c in before) and "weights_version" not in pieces[0]
    runs = [[0, 0], [3, 1], [5, 4]]
    assert last["weights_versions"] == whole["choices"][0]["weights_versions"] == runs
    assert whole["choices"][0]["weights_version"] == 4


def check_text(harness, body, choice, text, whole, total):
    """The text is what its tokens decode to, cut where a stop says."""
    tokenizer = harness.tokenizer
    if not body.get("return_token_ids"):
        return
    tokens = choice["token_ids"]
    keep = body.get("include_stop_str_in_output", False)
    shown = tokens
    if choice["finish_reason"] == "stop" and not isinstance(choice["stop_reason"], str) and not keep:
        shown = tokens[:-1]
    full = tokenizer.decode(shown, skip_special_tokens=body.get("skip_special_tokens", True))
    if body.get("echo"):
        n = body.get("n", 1)
        prompts = body["prompt"] if isinstance(body["prompt"], list) else [body["prompt"]]
        prompt = body["prompt"] if isinstance(body["prompt"][0], int) else prompts[choice["index"] // n]
        before = prompt if isinstance(prompt, str) else tokenizer.decode(prompt, skip_special_tokens=False)
        assert text.startswith(before)
        text = text[len(before) :]
    if isinstance(choice["stop_reason"], str):
        end = full.rindex(choice["stop_reason"]) + (len(choice["stop_reason"]) if keep else 0)
        assert text == full[:end]
    else:
        assert text == full
    stops = body.get("stop") or []
    stops = [stops] if isinstance(stops, str) else stops
    if not keep and body.get("min_tokens", 0) <= 1:
        assert not any(s in text for s in stops)
    logprobs = choice.get("logprobs")
    if logprobs and "text_offset" in logprobs:
        count = len(tokens) + (len(choice["prompt_token_ids"]) if body.get("echo") else 0)
        assert {len(v) for v in logprobs.values()} == {count}
        assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_scoring_a_prompt(harness):
    """max_tokens 0 with echo: the prompt's log-probabilities, and nothing of what follows."""
    body = {"prompt": "Hello world", "max_tokens": 0, "echo": True, "logprobs": 2, "seed": 1, "n": 2}
    whole = harness.runner.run(harness.http.post("/v1/completions", json=body)).json()
    streamed = harness.runner.run(
        harness.http.post("/v1/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    chunks = events(streamed)
    assert put_together(chunks[:-1], chat=False)[0] == whole["choices"]
    choice = whole["choices"][1]
    assert choice["text"] == "Hello world" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["Hello", " world"] and choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 5]
    assert whole["usage"]["completion_tokens"] == 0 and chunks[-1]["usage"] == whole["usage"]


def test_seeds(harness):
    """Choices differ, the same seed repeats them, another changes them, and without one they are drawn."""

    def texts(**fields):
        body = {"prompt": "Seed", "max_tokens": 12, "n": 3, "ignore_eos": True, **fields}
        answer = harness.runner.run(harness.http.post("/v1/completions", json=body)).json()
        return [c["text"] for c in answer["choices"]]

    one = texts(seed=1)
    assert len(set(one)) == 3 and texts(seed=1) == one and not set(texts(seed=2)) & set(one)
    assert texts(seed=1, n=1) == one[:1]
    assert texts(seed=-1) != one and texts() != texts()
    assert len(set(texts(temperature=0))) == 1


def test_cached_tokens_are_said(harness):
    body = {"prompt": list(range(100, 150)), "max_tokens": 2}
    first, second = (harness.runner.run(harness.http.post("/v1/completions", json=body)).json() for _ in range(2))
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 48}


def test_usage_with_every_event(harness):
    body = {
        "prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }  # fmt: skip
    chunks = events(harness.runner.run(harness.http.post("/v1/completions", json=body)))
    assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 3, 4, 5, 5]
