"""Fields that came with OpenAI's newer clients and with vLLM's: what each does to an answer."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planaria import StructuredOutputsParams, __version__
from planaria.server.common import output_form
from planaria.server.schema import ChatCompletionRequest

C, H = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
BEGUN = [*USER, {"role": "assistant", "content": "Oh, "}]


async def post(server: Any, path: str, **body: Any) -> dict[str, Any]:
    async with server.http() as http:
        answer = await http.post(path, json={"max_tokens": 3, "temperature": 0, **body})
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


async def chat(server: Any, **body: Any) -> dict[str, Any]:
    return await post(server, H, **{"messages": USER, **body})


def prompt(server: Any) -> list[int]:
    """Of the last request, as its engine got it."""
    found: list[int] = server.engine.submitted[-1].prompt
    return found


async def test_the_newer_maximum_counts(server: Any) -> None:
    await chat(server, max_tokens=2, max_completion_tokens=4)
    assert server.engine.submitted[-1].max_tokens == 4


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"type": "json_object", "value": {"type": "integer"}}, {"json": {"type": "integer"}}),
        ({"type": "json", "value": {"type": "integer"}}, {"json": {"type": "integer"}}),
        ({"type": "regex", "value": "[0-9]+"}, {"regex": "[0-9]+"}),
        ({"type": "json_object"}, {"json_object": True}),
    ],
)
def test_forms_of_an_answer_in_hugging_faces_words(asked: dict[str, Any], form: dict[str, Any]) -> None:
    request = ChatCompletionRequest.model_validate({"messages": USER, "response_format": asked})
    assert output_form(request) == (StructuredOutputsParams(**form), "response_format")


async def test_a_fingerprint(server: Any) -> None:
    found = {(await chat(server))["system_fingerprint"], (await post(server, C, prompt="x"))["system_fingerprint"]}
    assert len(found) == 1 and found.pop().startswith(f"planaria-{__version__}-")
    async with (
        server.http() as http,
        http.stream("POST", H, json={"messages": USER, "stream": True, "max_tokens": 2}) as r,
    ):
        events = [json.loads(line[6:]) async for line in r.aiter_lines() if line.startswith("data: {")]
    assert len(events) > 1 and all(event["system_fingerprint"] for event in events)


async def test_head(server: Any) -> None:
    async with server.http() as http:
        for path in ("/health", "/v1/models", "/version", "/metrics"):
            answer = await http.head(path)
            assert (answer.status_code, answer.content) == (200, b""), path
            assert answer.headers["content-type"] == (await http.get(path)).headers["content-type"]
        assert (await http.head("/v1/models/nobody")).status_code == 404


async def test_refusals_are_text(server: Any, tokenizer: Any) -> None:
    parts = [{"type": "refusal", "refusal": "No."}, {"type": "text", "text": "Never."}]
    await chat(server, messages=[*USER, {"role": "assistant", "content": parts}, *USER])
    assert "No.\nNever." in tokenizer.decode(prompt(server), False)


async def test_the_last_message_goes_on(server: Any, tokenizer: Any) -> None:
    found = await chat(server, messages=BEGUN, continue_final_message=True, add_generation_prompt=False)
    assert tokenizer.decode(prompt(server), False).endswith("<|im_start|>assistant\nOh, ")
    odd = [*USER, {"role": "assistant", "content": "assistant"}]
    await chat(server, messages=odd, continue_final_message=True)
    assert tokenizer.decode(prompt(server), False).endswith("<|im_start|>assistant\nassistant")
    plain = found["choices"][0]["message"]["content"]
    found = await chat(server, messages=BEGUN, continue_final_message=True, echo=True)
    assert found["choices"][0]["message"]["content"] == "Oh, " + plain
    assert (await chat(server, echo=True))["choices"][0]["message"]["content"][:2] != "Hi"
    body = {"messages": BEGUN, "continue_final_message": True, "echo": True, "stream": True, "max_tokens": 3}
    async with server.http() as http, http.stream("POST", H, json={**body, "temperature": 0}) as answer:
        events = [json.loads(line[6:]) async for line in answer.aiter_lines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "Oh, " + plain


async def test_the_template_gets_what_it_may_read(start: Any, tokenizer: Any) -> None:
    template = "{{ reasoning_effort }}/{{ verbosity }}/{{ more }}/{{ messages[0].content }}"
    async with start(trust_request_chat_template=True) as server:
        await chat(server, chat_template=template, reasoning_effort="low", verbosity="high",
                   chat_template_kwargs={"more": 1})  # fmt: skip
        assert tokenizer.decode(prompt(server)) == "low/high/1/Hi"
        await chat(server, chat_template=template, reasoning_effort="low", chat_template_kwargs={"reasoning_effort": 2})
        assert tokenizer.decode(prompt(server)) == "2///Hi"


@pytest.mark.parametrize("path", [C, H])
async def test_the_end_of_a_prompt(server: Any, tokenizer: Any, path: str) -> None:
    text = "one two three four five " * 200  # more than the model is for
    body: dict[str, Any] = {"prompt": text} if path == C else {"messages": [{"role": "user", "content": text}]}
    await post(server, path, truncate_prompt_tokens=4, **body)
    last = prompt(server)
    assert len(last) == 4
    await post(server, path, truncate_prompt_tokens=-1, **body)
    assert len(prompt(server)) == 512 - 3 and prompt(server)[-4:] == last
    if path == C:
        assert (await post(server, path, truncate_prompt_tokens=4, echo=True, **body))["choices"][0]["text"].startswith(
            tokenizer.decode(last)
        )


async def test_tokens_by_their_numbers(server: Any) -> None:
    found = (await chat(server, logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, return_token_ids=True))[
        "choices"
    ][0]
    assert [p["token"] for p in found["logprobs"]["content"]] == [f"token_id:{t}" for t in found["token_ids"]]
    assert all(p["top_logprobs"][0]["token"].startswith("token_id:") for p in found["logprobs"]["content"])
    found = (await post(server, C, prompt="x", logprobs=1, echo=True, return_tokens_as_token_ids=True))["choices"][0]
    assert all(token.startswith("token_id:") for token in found["logprobs"]["tokens"])


async def test_tokens_that_are_allowed(server: Any) -> None:
    await chat(server, allowed_token_ids=[5, 6])
    assert server.engine.submitted[-1].params.allowed_token_ids == (5, 6)


async def test_a_name_of_the_clients_own(server: Any) -> None:
    assert (await chat(server, request_id="mine"))["id"] == "chatcmpl-mine"
    assert (await post(server, C, prompt="x", request_id="mine"))["id"] == "cmpl-mine"


async def test_what_the_tokenizer_is(server: Any, tokenizer: Any) -> None:
    async with server.http() as http:
        found = (await http.get("/tokenizer_info")).json()
    assert found["chat_template"] == tokenizer.chat_template and found["model_max_length"] == 512
    assert found["vocab_size"] == 49152 and found["special_tokens"]["eos_token"] == "<|im_end|>"
