"""Whatever is sent, the answer is an error in OpenAI's shape that names the field, and nobody else notices."""

from __future__ import annotations

import asyncio
import gzip
import json

import pytest

C, H = "/v1/completions", "/v1/chat/completions"
BARE = {"prompt": [5, 6], "max_tokens": 3, "min_tokens": 3, "return_token_ids": True}
USER = [{"role": "user", "content": "Hi"}]
NESTED: dict = {}
for _ in range(80):
    NESTED = {"items": NESTED}


def c(**fields):
    return C, {"model": "smollm2", "prompt": "Hello", **fields}


def h(**fields):
    return H, {"model": "smollm2", "messages": USER, **fields}


def tool(name, **fields):
    return {"type": "function", "function": {"name": name, **fields}}


DEEP: dict = {}
for _ in range(100):
    DEEP = {"properties": DEEP}

# name -> (path, body), status, param (None: not looked at), words of the message
TABLE = {
    "unknown model": (c(model="gpt-4"), 404, "model", "gpt-4"),
    "no prompt": ((C, {"model": "smollm2"}), 400, "prompt", "required"),
    "null prompt": (c(prompt=None), 400, "prompt", "string"),
    "number prompt": (c(prompt=7), 400, "prompt", "string"),
    "empty prompt": (c(prompt=""), 400, "prompt", "empty"),
    "empty list": (c(prompt=[]), 400, "prompt", "empty"),
    "list with an empty list": (c(prompt=[[1], []]), 400, "prompt", "empty"),
    "mixed prompt": (c(prompt=["a", 1]), 400, "prompt", "list"),
    "token id below": (c(prompt=[5, -1]), 400, "prompt", "-1"),
    "token id above": (c(prompt=[5, 49152]), 400, "prompt", "49152"),
    "token id enormous": (c(prompt=[10**25]), 400, "prompt", "digits"),
    "token id a bool": (c(prompt=[True, False]), 400, "prompt", "list"),
    "prompt too long": (c(prompt=[5] * 600), 400, "prompt", "600 tokens"),
    "long text": (c(prompt="word " * 5000), 400, "prompt", "5001 tokens"),
    "prompt and max_tokens": (c(prompt=[5] * 500, max_tokens=20), 400, "max_tokens", "520 tokens"),
    "text longer than any tokens": (c(prompt="x" * 1_000_000), 400, "prompt", "1000000 characters"),
    "texts longer than any tokens": (c(prompt=["x", "x" * 1_000_000]), 400, "prompt", "1000000 characters"),
    "chat longer than any tokens": (
        h(messages=[{"role": "user", "content": "x" * 1_000_000}]), 400, "messages", "characters",
    ),
    "more prompts": (c(prompt=[[]] * 100_000), 400, "prompt", "100000 entries"),
    "many messages": (h(messages=USER * 20_000), 400, "messages", "20000 entries"),
    "many fields": ((C, {f"f{i}": 1 for i in range(1000)}), 400, None, "1000 fields"),
    "many prompts": (c(prompt=["a"] * 2000), 400, "prompt", "2000"),
    "prompts times n": (c(prompt=["a"] * 100, n=100), 400, None, "10000 sequences"),
    "n": (c(n=10**9), 400, "n", "128"),
    "n of 40 digits": (c(n=10**40), 400, "n", None),
    "n zero": (c(n=0), 400, "n", None),
    "n a string": (c(n="2"), 400, "n", None),
    "n a float": (c(n=1.5), 400, "n", None),
    "max_tokens negative": (c(max_tokens=-1), 400, "max_tokens", None),
    "max_tokens zero": (c(max_tokens=0), 400, "max_tokens", "at least 1"),
    "max_tokens enormous": (c(max_tokens=10**30), 400, "max_tokens", None),
    "max_tokens a bool": (c(max_tokens=True), 400, "max_tokens", None),
    "min over max": (c(max_tokens=3, min_tokens=5), 400, "min_tokens", "3"),
    "min over room": (h(min_tokens=5000), 400, "min_tokens", "5000"),
    "temperature negative": (c(temperature=-0.5), 400, "temperature", None),
    "temperature a string": (c(temperature="hot"), 400, "temperature", None),
    "top_p": (c(top_p=1.5), 400, "top_p", None),
    "top_p zero": (c(top_p=0), 400, "top_p", None),
    "top_k": (c(top_k=-2), 400, "top_k", None),
    "min_p": (c(min_p=-0.1), 400, "min_p", None),
    "presence_penalty": (c(presence_penalty=3), 400, "presence_penalty", None),
    "frequency_penalty": (c(frequency_penalty=-3), 400, "frequency_penalty", None),
    "repetition_penalty": (c(repetition_penalty=0), 400, "repetition_penalty", None),
    "logprobs": (c(logprobs=1000), 400, "logprobs", None),
    "prompt_logprobs": (c(prompt_logprobs=-1), 400, "prompt_logprobs", None),
    "logit_bias key": (c(logit_bias={"the": 1}), 400, "logit_bias", "'the'"),
    "logit_bias vocabulary": (c(logit_bias={"49152": 1}), 400, "logit_bias", "49152"),
    "logit_bias negative": (c(logit_bias={"-1": 1}), 400, "logit_bias", None),
    "logit_bias enormous": (c(logit_bias={"9" * 30: 1}), 400, "logit_bias", None),
    "logit_bias value": (c(logit_bias={"5": 101}), 400, "logit_bias", None),
    "logit_bias a list": (c(logit_bias=[1]), 400, "logit_bias", None),
    "logit_bias entries": (c(logit_bias={str(i): 1 for i in range(2000)}), 400, "logit_bias", "2000"),
    "stop a number": (c(stop=5), 400, "stop", "string"),
    "stop empty": (c(stop=""), 400, "stop", None),
    "stop many": (c(stop=["a"] * 17), 400, "stop", "16"),
    "stop long": (c(stop="ab" * 20_000), 400, "stop", "40000 characters; each may have 512"),
    "stop long in chat": (h(stop=["x", "ab" * 20_000]), 400, "stop", "40000 characters"),
    "stop_token_ids": (c(stop_token_ids=[49152]), 400, "stop_token_ids", None),
    "bad_words empty": (c(bad_words=[""]), 400, "bad_words", None),
    "bad_words many": (c(bad_words=["a"] * 2000), 400, "bad_words", "2000 entries"),
    "bad_words long": (c(bad_words=["word " * 120] * 1024), 400, "bad_words", "614400 characters; at most"),
    "bad_words one long": (h(bad_words=["x1" * 200]), 400, "bad_words", "tokens; at most 64"),
    "prompt_logprobs times n": (
        c(prompt=[5] * 500, prompt_logprobs=20, n=128), 400, "prompt_logprobs", "1344000 log-probabilities",
    ),
    "logprobs of echoes": (
        c(prompt=[[5] * 500] * 100, logprobs=20, echo=True, max_tokens=1), 400, "prompt_logprobs", "1050000 log-prob",
    ),
    "logprobs of a conversation": (
        h(messages=[{"role": "user", "content": "a " * 400}], prompt_logprobs=20, n=128), 400, "prompt_logprobs", "x n",
    ),
    "seed": (c(seed=2**63), 400, "seed", None),
    "seed a float": (c(seed=0.5), 400, "seed", None),
    "best_of": (c(best_of=3), 400, "best_of", "best_of (3)"),
    "suffix": (c(suffix="end"), 400, "suffix", "not supported"),
    "stream options without stream": (c(stream_options={"include_usage": True}), 400, "stream_options", "stream"),
    "stream options' fields": (c(stream=True, stream_options={"x": 1}), 400, "stream_options.x", "unknown"),
    "stream a string": (c(stream="yes"), 400, "stream", None),
    "typo": (c(max_token=5), 400, "max_token", "did you mean max_tokens?"),
    "a chat's field": (c(messages=USER), 400, "messages", "/v1/chat/completions"),
    "a completion's field": (h(prompt="x"), 400, "prompt", "/v1/completions"),
    "max_completion_tokens zero": (h(max_completion_tokens=0), 400, "max_completion_tokens", "1"),
    "a text for an object": (h(response_format="json"), 400, "response_format", "must be an object"),
    "unknown": (c(frobnicate=True), 400, "frobnicate", "unknown"),
    "long unknown": (c(**{"x" * 5000: True}), 400, None, "unknown"),
    "guided": (c(guided_json=5), 400, "guided_json", None),
    "guided twice": (c(guided_json={}, guided_regex="a"), 400, "guided_regex", "exclude each other"),
    "two forms": (c(structured_outputs={"json": {}, "regex": "a"}), 400, "structured_outputs", "exactly one"),
    "no form": (c(structured_outputs={}), 400, "structured_outputs", "none of them"),
    "an unknown form": (c(structured_outputs={"xml": "a"}), 400, "structured_outputs.xml", "unknown"),
    "an empty choice": (c(guided_choice=["a", ""]), 400, "guided_choice", "none empty"),
    "no choice at all": (c(guided_choice=[]), 400, "guided_choice", "one string or more"),
    "a schema that is no JSON": (c(structured_outputs={"json": "{"}), 400, "structured_outputs", "not valid JSON"),
    "a deep schema": (c(guided_json=NESTED), 400, "guided_json", "guided_json.items.items"),
    "a large grammar": (c(guided_grammar="x" * 140_000), 400, "guided_grammar", "140000 characters"),
    "parentheses": (c(guided_regex="(" * 100 + ")" * 100), 400, "guided_regex", "100 levels"),
    "whitespace of a regex": (
        c(structured_outputs={"regex": "a", "disable_additional_properties": True}), 400, "structured_outputs",
        "for JSON",
    ),
    "a tag that begins with no trigger": (
        c(structured_outputs={"structural_tag": {"structures": [{"begin": "<a", "end": ">"}], "triggers": ["<b"]}}),
        400, "structured_outputs", "structural_tag.structures.0.begin",
    ),
    "beam search": (c(use_beam_search=True), 400, "use_beam_search", "not supported"),
    "priority": (c(priority=2**40), 400, "priority", None),
    "empty salt": (c(cache_salt=""), 400, "cache_salt", None),
    "long salt": (h(cache_salt="x" * 257), 400, "cache_salt", None),
    "no messages": ((H, {"model": "smollm2"}), 400, "messages", "required"),
    "empty messages": (h(messages=[]), 400, "messages", None),
    "messages a string": (h(messages="Hi"), 400, "messages", None),
    "role": (h(messages=[{"role": "wizard", "content": "x"}]), 400, "messages[0].role", None),
    "no role": (h(messages=[{"content": "x"}]), 400, "messages[0].role", None),
    "content a number": (h(messages=[{"role": "user", "content": 5}]), 400, None, "content"),
    "no content": (h(messages=[{"role": "user"}]), 400, "messages[0].content", "content is required"),
    "image": (
        h(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]),
        400, "messages[0].content[0]", "image_url",
    ),
    "text part without text": (
        h(messages=[{"role": "user", "content": [{"type": "text"}]}]), 400, "messages[0].content[0]", "text",
    ),
    "chat too long": (h(messages=[{"role": "user", "content": "word " * 3000}]), 400, "messages", "tokens"),
    "tools that the model can't be told": (h(tools=[tool("f")]), 400, "tools", "no place for tools"),
    "tools a string": (h(tools="f"), 400, "tools", "list of tools"),
    "tool a string": (h(tools=["f"]), 400, "tools[0]", "object"),
    "tool of another kind": (h(tools=[{"type": "custom"}]), 400, "tools[0].type", "'custom'"),
    "tool without a function": (h(tools=[{"type": "function"}]), 400, "tools[0].function", "name"),
    "tool's name": (h(tools=[tool("f"), tool("a b")]), 400, "tools[1].function.name", "'a b'"),
    "tool's long name": (h(tools=[tool("f" * 129)]), 400, "tools[0].function.name", "128"),
    "tool's schema": (h(tools=[tool("f", parameters=["x"])]), 400, "tools[0].function.parameters", "schema"),
    "tool's type": (
        h(tools=[tool("f", parameters={"type": "array"})]), 400, "tools[0].function.parameters.type", "names",
    ),
    "tool's depth": (h(tools=[tool("f", parameters=DEEP)]), 400, "tools[0]", "nested"),
    "tool's description": (h(tools=[tool("f", description=5)]), 400, "tools[0].function.description", "string"),
    "tool twice": (h(tools=[tool("f"), tool("f")]), 400, "tools[1].function.name", "twice"),
    "many tools": (h(tools=[tool("f")] * 513), 400, "tools", "512"),
    "large tools": (h(tools=[tool("f", description="x" * 270_000)]), 400, "tools", "262144"),
    "tool_choice": (h(tool_choice="required"), 400, "tool_choice", "needs tools"),
    "tool_choice a number": (h(tools=[tool("f")], tool_choice=5), 400, "tool_choice", "none, auto"),
    "tool_choice of nobody": (
        h(tools=[tool("f")], tool_choice={"type": "function", "function": {"name": "g"}}), 400, "tool_choice", "'g'",
    ),
    "tool_choice without a name": (
        h(tools=[tool("f")], tool_choice={"type": "function"}), 400, "tool_choice.function.name", "required",
    ),
    "tool_choice among nobody": (
        h(tools=[tool("f")], tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}),
        400, "tool_choice.allowed_tools.tools", "1 to 512",
    ),
    "metadata": (h(metadata={f"a{i}": "b" for i in range(17)}), 400, "metadata", None),
    "service_tier": (h(service_tier="best"), 400, "service_tier", None),
    "json_schema": (h(response_format={"type": "json_schema"}), 400, "response_format", "schema is required"),
    "a format without its value": (h(response_format={"type": "regex"}), 400, "response_format", "value is a schema"),
    "a value of another format": (
        h(response_format={"type": "json_schema", "value": {}}), 400, "response_format", "value is a schema",
    ),
    "a type of format": (h(response_format={"type": "xml"}), 400, "response_format", "'xml' is none of"),
    "top_logprobs alone": (h(top_logprobs=2), 400, "top_logprobs", "logprobs"),
    "logprobs a number": (h(logprobs=2), 400, "logprobs", None),
    "no truncation": (c(truncate_prompt_tokens=0), 400, "truncate_prompt_tokens", "at least 1"),
    "request_id": (c(request_id="a b"), 400, "request_id", None),
    "allowed_token_ids": (c(allowed_token_ids=[]), 400, "allowed_token_ids", None),
    "allowed_token_ids above": (c(allowed_token_ids=[49152]), 400, "allowed_token_ids", "vocabulary"),
    "two ways to begin": (
        h(continue_final_message=True, add_generation_prompt=True), 400, "continue_final_message", "exclude",
    ),
    "nothing to go on with": (
        h(messages=[*USER, {"role": "assistant", "content": ""}], continue_final_message=True),
        400, "continue_final_message", "final message",
    ),
    "template code": (h(chat_template="{{ 1 }}"), 400, "chat_template", "--trust-request-chat-template"),
    "template variables": (h(chat_template_kwargs={"chat_template": "{{1}}"}), 400, "chat_template_kwargs", None),
    "many template variables": (
        h(chat_template_kwargs={f"a{i}": i for i in range(1000)}), 400, "chat_template_kwargs", "1000 entries",
    ),
    "tokenize nothing": (("/tokenize", {}), 400, "prompt", "either"),
    "tokenize both": (("/tokenize", {"prompt": "x", "messages": USER}), 400, "prompt", "either"),
    "tokenize much": (("/tokenize", {"prompt": "x " * 600_000}), 400, "prompt", "1200000 characters"),
    "tokenize a long conversation": (
        ("/tokenize", {"messages": [{"role": "user", "content": "x " * 600_000}]}), 400, "messages", "characters",
    ),
    "detokenize much": (("/detokenize", {"tokens": [5] * 1_100_000}), 400, "tokens", "1100000 entries"),
    "detokenize ids": (("/detokenize", {"tokens": [10**30]}), 400, "tokens", None),
    "detokenize text": (("/detokenize", {"tokens": "x"}), 400, "tokens", "list"),
}  # fmt: skip

RAW = {
    "empty body": b"",
    "not JSON": b"{'model': 1}",
    "cut": b'{"model": "smollm2", "prompt": "He',
    "a list": b"[]",
    "a number": b"5",
    "invalid UTF-8": b'{"model": "smollm2", "prompt": "\xff\xfe"}',
    "half a surrogate": b'{"model": "smollm2", "prompt": "\\ud800"}',
    "NaN": b'{"model": "smollm2", "prompt": "x", "temperature": NaN}',
    "Infinity": b'{"model": "smollm2", "prompt": "x", "temperature": 1e999}',
    "minus Infinity": b'{"model": "smollm2", "prompt": "x", "logit_bias": {"5": -Infinity}}',
    "deep": b'{"model": "smollm2", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep and unused": b'{"model": "smollm2", "prompt": "x", "metadata": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "deep message": b'{"messages": [{"role": "user", "content": "x", "y": ' + b"[" * 600 + b"]" * 600 + b"}], "
    b'"frob": 1}',
    "lists": b'{"prompt": [' + b"[]," * 300_000 + b"[]]}",
    "5,000 digits": b'{"model": "smollm2", "prompt": "x", "n": 1' + b"0" * 5000 + b"}",
    "NUL": b"\0" * 100,
}


def check(answer, status, param=None, words=None):
    assert answer.status_code == status, answer.text[:500]
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and len(error["message"]) < 2100 and error["type"] and "\n" not in error["message"]
    if param is not None:
        assert error["param"] == param, error
    if words is not None:
        assert words in error["message"], error


async def test_refusals(server):
    neighbour = asyncio.create_task(_neighbour(server))
    async with server.http() as http:
        for name, ((path, body), status, param, words) in TABLE.items():
            try:
                check(await http.post(path, json=body), status, param, words)
                if not {"stream", "stream_options"} & set(body) and path in (C, H):
                    check(await http.post(path, json={**body, "stream": True}), status)
            except AssertionError as e:
                raise AssertionError(f"{name}: {e}") from e
        for name, body in RAW.items():
            for path in (C, H, "/tokenize", "/detokenize"):
                answer = await http.post(path, content=body, headers={"content-type": "application/json"})
                assert answer.status_code == 400, (name, path, answer.text[:300])
                check(answer, 400)
        for word in (b"NaN", b"Infinity", b"-Infinity"):  # no JSON, but some clients write it: the field is named
            answer = await http.post(C, content=b'{"prompt": "x", "temperature": %b}' % word)
            check(answer, 400, "temperature", "finite")
    server.engine.gate.set()
    assert await neighbour == 100
    assert len(server.engine.submitted) == 1 and not server.engine.cancelled


async def _neighbour(server) -> int:
    """A stream that is open all the while."""
    server.engine.gate.clear()
    async with server.http() as http:
        body = {"model": "smollm2", "prompt": "Meanwhile", "max_tokens": 100, "ignore_eos": True, "stream": True}
        async with http.stream("POST", C, json=body) as answer:
            lines = [line async for line in answer.aiter_lines() if line.startswith("data: {")]
    return len(lines)


async def test_paths_and_methods(server):
    async with server.http() as http:
        check(await http.get("/v1/nothing"), 404, words="/v1/nothing")
        check(await http.post("/nothing", json={}), 404)
        check(await http.get(C), 405, words="GET")
        check(await http.delete("/v1/models"), 405)
        check(await http.post("/health", json={}), 405)
        check(await http.get("/v1/models/other/name"), 404)
        check(await http.get("/v1/models/"), 404)
        assert (await http.get(C)).headers["allow"] == "POST"


async def test_neutral_fields_are_taken(server):
    async with server.http() as http:
        body = {
            "tools": [], "tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"},
            "user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "modalities": ["text"],
            "functions": None, "temperature": None, "stop": None, "n": None, "logit_bias": None, "max_tokens": 2,
            "logprobs": None, "stream_options": None, "seed": None,
        }  # fmt: skip
        answer = await http.post(H, json={"messages": USER, **body})
        assert answer.status_code == 200, answer.text
        body = {"suffix": "", "best_of": 2, "n": 2, "use_beam_search": False, "length_penalty": 1.0, "max_tokens": 2}
        answer = await http.post(C, json={"prompt": "x", **body})
        assert answer.status_code == 200, answer.text


async def test_body_limit(start):
    async with start(max_body_bytes=100_000) as server, server.http() as http:
        body = json.dumps({"model": "smollm2", "prompt": "x" * 10_000_000}).encode()
        check(await http.post(C, content=body), 413, words="100000 bytes")

        async def chunks():
            for _ in range(50):
                yield b"x" * 10_000

        check(await http.post(C, content=chunks()), 413)
        check(await http.post("/tokenize", content=body[:99_000]), 400)  # cut: not JSON, but not too large
        assert (await http.post(C, json={"prompt": "x", "max_tokens": 1})).status_code == 200
        # A declared length no one would wait for is refused before a byte of the body is sent.
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sock.getsockname()[1])
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        async with asyncio.timeout(60):
            assert b" 413 " in await reader.readline()
            await reader.read()  # and the connection ends
        writer.close()
        assert not server.engine.open


async def test_default_body_limit(server):
    async with server.http() as http:
        check(await http.post(C, content=b"[" + b"1," * 5_000_000 + b"1]"), 413)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
async def test_a_page_of_another_site_cant_post(server, kind):
    headers = {"origin": "https://evil.example"} | ({"content-type": kind} if kind else {})
    body = json.dumps({"model": "smollm2", "prompt": "x"}).encode()
    async with server.http() as http:
        check(await http.post(C, content=body, headers=headers), 415)
    assert not server.engine.submitted


async def test_a_body_that_is_compressed_is_refused_by_that_name(server):
    body = json.dumps({"model": "smollm2", "prompt": "x", "max_tokens": 1}).encode()
    async with server.http() as http:
        check(
            await http.post(C, content=gzip.compress(body), headers={"content-encoding": "gzip"}), 415, words="'gzip'"
        )
        assert (await http.post(C, content=body, headers={"content-encoding": "identity"})).status_code == 200
        check(await http.post(C, content=b" "), 400, words="no body")
        both = {"content-length": "5", "transfer-encoding": "chunked"}
        check(await http.post(C, content=b"0\r\n\r\n", headers=both), 400, words="either content-length or")


async def test_without_a_tokenizer(tokenizer):
    from tests.api.conftest import running
    from tests.api.fake_engine import FakeEngine

    async with running(FakeEngine(None), None, eos_ids=(2,)) as server, server.http() as http:
        answer = await http.post(C, json={**BARE, "logprobs": 2})
        choice = answer.json()["choices"][0]
        assert len(choice["token_ids"]) == 3 and choice["text"] == "" and choice["prompt_token_ids"] == [5, 6]
        assert server.engine.submitted[0].eos_ids == (2,)
        check(await http.post(C, json={"prompt": "text"}), 400, "prompt", "--skip-tokenizer-init")
        check(await http.post(C, json={"prompt": [5], "stop": "x"}), 400, "stop", "stop_token_ids")
        check(await http.post(C, json={"prompt": [5], "bad_words": ["x"]}), 400, "bad_words")
        check(await http.post(H, json={"messages": USER}), 400, "messages")
        check(await http.post("/tokenize", json={"prompt": "x"}), 400, "prompt")
        check(await http.post("/detokenize", json={"tokens": [1]}), 400, "tokens")
