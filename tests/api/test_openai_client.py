"""The official client drives a real server."""

from __future__ import annotations

from typing import Any

import msgspec
import openai
import pytest
from openai.types import completion_create_params as completion
from openai.types.chat import chat_completion_stream_options_param, completion_create_params
from openai.types.responses.response_create_params import ResponseCreateParamsBase

from planaria.server.schema import NEUTRAL, ChatCompletionRequest, CompletionRequest, StreamOptions
from planaria.server.schema_responses import ResponsesRequest
from planaria.types import SamplingParams
from tests.pure.test_api_fields import NEEDED

# Beside OpenAI's, what clients of vLLM send.
EXTRAS = """echo best_of top_k min_p repetition_penalty min_tokens stop_token_ids include_stop_str_in_output ignore_eos
    skip_special_tokens spaces_between_special_tokens prompt_logprobs priority use_beam_search length_penalty
    early_stopping bad_words allowed_token_ids add_generation_prompt continue_final_message add_special_tokens documents
    chat_template chat_template_kwargs mm_processor_kwargs guided_json guided_regex guided_choice guided_grammar
    guided_decoding_backend guided_whitespace_pattern structural_tag structured_outputs request_id logits_processors
    return_tokens_as_token_ids return_token_ids cache_salt kv_transfer_params vllm_xargs truncate_prompt_tokens
    include_reasoning thinking_token_budget prompt_embeds"""


async def test_models(server):
    client = server.client()
    models = [m async for m in client.models.list()]
    assert [m.id for m in models] == ["smollm2"] and models[0].max_model_len == 512
    assert (await client.models.retrieve("smollm2")).id == "smollm2"
    with pytest.raises(openai.NotFoundError) as e:
        await client.models.retrieve("gpt-4")
    assert e.value.code == "model_not_found"


async def test_completion(server, tokenizer):
    client = server.client()
    ids = tokenizer.encode("Hello")
    server.engine.script[tuple(ids)] = tokenizer.encode(" world and more of it")
    answer = await client.completions.create(model="smollm2", prompt="Hello", max_tokens=4)
    choice = answer.choices[0]
    assert choice.text == " world and more of" and choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == 1 and answer.usage.completion_tokens == 4 and answer.usage.total_tokens == 5
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.id.startswith("cmpl-") and answer.model == "smollm2" and answer.object == "text_completion"
    default = await client.completions.create(model="smollm2", prompt="Hello")
    assert default.usage.completion_tokens == 16


async def test_prompts_of_every_kind(server, tokenizer):
    client = server.client()
    a, b = tokenizer.encode("One two"), tokenizer.encode("Three")
    texts = await client.completions.create(model="smollm2", prompt=["One two", "Three"], temperature=0, n=2)
    ids = await client.completions.create(model="smollm2", prompt=[a, b], temperature=0, n=2)
    single = await client.completions.create(model="smollm2", prompt=a, temperature=0)
    assert [c.index for c in texts.choices] == [0, 1, 2, 3]
    assert [c.text for c in texts.choices] == [c.text for c in ids.choices]
    assert single.choices[0].text == texts.choices[0].text == texts.choices[1].text
    assert texts.choices[2].text != texts.choices[0].text
    assert texts.usage.prompt_tokens == len(a) + len(b)


async def test_stream_has_one_event_a_step(server):
    client = server.client()
    stream = await client.completions.create(
        model="smollm2", prompt="Go", max_tokens=20, stream=True, stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = [c async for c in stream]
    *deltas, last = chunks
    assert len(deltas) == 20 and all(len(c.choices) == 1 and c.usage is None for c in deltas)
    assert [c.choices[0].finish_reason for c in deltas] == [None] * 19 + ["length"]
    assert last.choices == [] and last.usage.completion_tokens == 20


async def test_chat(server, tokenizer):
    client = server.client()
    parts = [{"type": "text", "text": "Hi"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    answer = await client.chat.completions.create(model="smollm2", messages=messages, max_completion_tokens=8)
    sent = server.engine.submitted[0]
    assert tokenizer.decode(sent.prompt, skip_special_tokens=False) == tokenizer.apply_chat_template(
        [messages[0], {"role": "user", "content": "Hi"}]
    )
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.usage.completion_tokens <= 8
    await client.chat.completions.create(model="smollm2", messages=messages)
    assert server.engine.submitted[1].max_tokens == 512 - len(sent.prompt)


async def test_chat_stream(server):
    client = server.client()
    stream = await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Hi"}], max_tokens=9, stream=True, n=2, seed=5,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    chunks = [c async for c in stream]
    for index in range(2):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and mine[0].delta.content == ""
        assert all(c.delta.role is None for c in mine[1:]) and len(mine) == 10
        assert mine[-1].finish_reason == "length"
    assert chunks[0].object == "chat.completion.chunk" and len({c.id for c in chunks}) == 1


async def test_chat_logprobs(server, tokenizer):
    client = server.client()
    server.engine.palette = tokenizer.encode(" one 日本 two 🙂 é")  # no special tokens, characters in parts
    answer = await client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "Hi"}], max_tokens=30, logprobs=True, top_logprobs=3,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens == 30
    assert all(len(c.top_logprobs) == 3 for c in content)
    assert b"".join(bytes(c.bytes) for c in content).decode("utf-8", "replace") == answer.choices[0].message.content
    assert content[0].logprob == -9999.0  # the fake gives -inf at position 0


async def test_stop(server, tokenizer):
    client = server.client()
    server.engine.script[tuple(tokenizer.encode("Count"))] = tokenizer.encode(" one two three four five six")
    answer = await client.completions.create(model="smollm2", prompt="Count", max_tokens=16, stop=["ree f"])
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (" one two th", "stop", "ree f")
    assert answer.usage.completion_tokens == 4
    await server.engine.until(lambda: server.engine.cancelled)
    kept = await client.completions.create(
        model="smollm2", prompt="Count", max_tokens=16, stop="ree f", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == " one two three f"
    four = tokenizer.encode(" four")[0]
    by_id = await client.completions.create(
        model="smollm2", prompt="Count", max_tokens=16, extra_body={"stop_token_ids": [four]}
    )
    assert (by_id.choices[0].text, by_id.choices[0].stop_reason) == (" one two three", four)


async def test_every_parameter_reaches_the_engine(server):
    given = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.1, "seed": 3, "min_tokens": 2, "logprobs": 4, "prompt_logprobs": 1, "ignore_eos": True,
        "skip_special_tokens": False, "include_stop_str_in_output": True, "max_tokens": 9,
    }  # fmt: skip
    lists = {"stop": ["x", "y"], "stop_token_ids": [7, 8], "bad_words": ["no"], "logit_bias": {"50": -100, "7": 1.5}}
    async with server.http() as http:
        answer = await http.post(
            "/v1/completions", json={"prompt": [5], "priority": 3, "cache_salt": "mine", **given, **lists}
        )
        assert answer.status_code == 200, answer.text
        chat = {k: v for k, v in given.items() if k != "logprobs"} | {"logprobs": True, "top_logprobs": 4}
        body = {"messages": [{"role": "user", "content": "x"}], "priority": 3, "cache_salt": "mine", **chat, **lists}
        assert (await http.post("/v1/chat/completions", json=body)).status_code == 200
        await http.post("/v1/completions", json={"prompt": "x"})
        await http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    first, second, plain, plain_chat = server.engine.submitted
    for message in (first, second):
        params = message.params
        assert {k: getattr(params, k) for k in given} == given
        assert (params.stop, params.stop_token_ids, params.bad_words) == (("x", "y"), (7, 8), ())  # spelled below
        assert params.logit_bias == {50: -100.0, 7: 1.5} and params.bad_words_ids and params.n == 1
        assert (message.seed, message.max_tokens, message.priority, message.cache_salt) == (3, 9, 3, "mine")
    defaults = SamplingParams()
    assert plain.params == defaults and plain_chat.params == msgspec.structs.replace(defaults, max_tokens=None)


async def test_tokenize(server, tokenizer):
    async with server.http() as http:
        text = "Grüße, 日本 🙂\n"
        ids = tokenizer.encode(text)
        answer = (await http.post("/tokenize", json={"model": "smollm2", "prompt": text})).json()
        assert answer == {"count": len(ids), "max_model_len": 512, "tokens": ids}
        assert (await http.post("/detokenize", json={"model": "smollm2", "tokens": ids})).json() == {"prompt": text}
        answer = (await http.post("/tokenize", json={"prompt": "two words", "return_token_strs": True})).json()
        assert answer["token_strs"] == ["two", " words"]
        messages = [{"role": "user", "content": "Hi"}]
        for generation in (True, False):
            body = {"messages": messages, "add_generation_prompt": generation}
            expected = tokenizer.encode(tokenizer.apply_chat_template(messages, generation), False)
            assert (await http.post("/tokenize", json=body)).json()["tokens"] == expected
        assert (await http.post("/tokenize", json={"prompt": "", "model": None})).json()["tokens"] == []
        assert (await http.post("/tokenize", json={"prompt": "x", "model": "y"})).status_code == 404


async def test_errors(server):
    client = server.client()
    with pytest.raises(openai.NotFoundError) as e:
        await client.completions.create(model="other", prompt="x")
    assert e.value.code == "model_not_found" and e.value.param == "model"
    with pytest.raises(openai.BadRequestError) as e:
        await client.completions.create(model="smollm2", prompt="x", temperature=-1)
    assert e.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as e:
        await client.completions.create(model="smollm2", prompt="x", max_tokens=600)
    assert "601 tokens" in e.value.message and "512" in e.value.message
    assert not server.engine.submitted


@pytest.mark.parametrize("model", list(NEEDED))
def test_every_field_of_openai_and_vllm_is_known(model: Any) -> None:
    params = completion_create_params if model is ChatCompletionRequest else completion
    theirs = {*params.CompletionCreateParamsBase.__annotations__, *EXTRAS.split(), "stream"}
    known = {*model.model_fields, *NEUTRAL, *model.neutral}
    if model is ResponsesRequest:
        theirs = {*ResponseCreateParamsBase.__annotations__, "stream"}
    if model is CompletionRequest:  # of conversations alone
        theirs -= {"add_generation_prompt", "chat_template_kwargs"}
    assert not theirs - known


def test_every_option_of_a_stream_is_known() -> None:
    theirs = chat_completion_stream_options_param.ChatCompletionStreamOptionsParam.__annotations__
    assert not set(theirs) - set(StreamOptions.model_fields)
