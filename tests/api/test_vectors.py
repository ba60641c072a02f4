"""Embeddings, classification, scores and reranking over HTTP: the official client, every route, what is refused."""

from __future__ import annotations

import asyncio
import base64
import json

import msgspec
import numpy as np
import openai
import pytest

from planaria.config.options import PoolingConfig
from planaria.server import embeddings, schema_vectors
from planaria.types import FinishReason
from tests.api.conftest import FakeEngine
from tests.api.fake_engine import WIDTH, vector

EMBEDS = PoolingConfig(tasks=("embed", "score"), width=WIDTH)
BOTH = PoolingConfig(tasks=("generate", "embed", "score"), width=WIDTH, sizes=())
LABELS = tuple(f"label {i}" for i in range(WIDTH))
CLASSES = PoolingConfig(tasks=("classify",), width=WIDTH, labels=LABELS, activation="softmax")
PAIRS = PoolingConfig(tasks=("classify", "score"), width=WIDTH, labels=LABELS[:1], activation="sigmoid")


def unit(ids: list[int], dimensions: int | None = None) -> np.ndarray:
    found = vector(ids)[:dimensions]
    return found / np.linalg.norm(found)


async def post(server, path: str, body: object, status: int = 200) -> dict:
    async with server.http() as http:
        content = body if isinstance(body, bytes) else msgspec.json.encode(body)
        answer = await http.post(path, content=content, headers={"content-type": "application/json"})
    assert answer.status_code == status, answer.text
    return answer.json()


async def test_the_official_client(start, tokenizer):
    """Its default is base64, which it decodes itself."""
    async with start(pooling=EMBEDS) as server:
        client = server.client()
        text, ids = "A text to embed", tokenizer.encode("A text to embed")
        one = await client.embeddings.create(model="smollm2", input=text)
        assert np.allclose(one.data[0].embedding, unit(ids)) and one.data[0].index == 0
        assert one.usage.prompt_tokens == one.usage.total_tokens == len(ids) and one.model == "smollm2"
        other = tokenizer.encode("Another")
        for given in ([text, "Another"], [ids, other]):
            for form in ("float", "base64"):
                many = await client.embeddings.create(model="smollm2", input=given, encoding_format=form)
                assert [e.index for e in many.data] == [0, 1] and many.usage.prompt_tokens == len(ids) + len(other)
                if form == "base64":
                    raw = [np.frombuffer(base64.b64decode(e.embedding), "<f4") for e in many.data]
                else:
                    raw = [e.embedding for e in many.data]
                assert np.allclose(raw, [unit(ids), unit(other)])
        assert np.allclose((await client.embeddings.create(model="smollm2", input=ids)).data[0].embedding, unit(ids))
        with pytest.raises(openai.BadRequestError) as e:
            await client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "x"}])
        assert e.value.code == "unsupported_task" and "it can: give embeddings" in e.value.message
        with pytest.raises(openai.BadRequestError) as e:
            await client.embeddings.create(model="smollm2", input="x", dimensions=4)
        assert e.value.param == "dimensions" and "wasn't trained for shorter vectors" in e.value.message
        with pytest.raises(openai.NotFoundError):
            await client.embeddings.create(model="other", input="x")


async def test_a_server_that_generates_embeds_too(start, tokenizer):
    async with start(pooling=BOTH) as server:
        client = server.client()
        ids = tokenizer.encode("x")
        written, embedded = await asyncio.gather(
            client.completions.create(model="smollm2", prompt="x", max_tokens=3, extra_body={"ignore_eos": True}),
            client.embeddings.create(model="smollm2", input="x", dimensions=3, encoding_format="float"),
        )
        assert written.usage.completion_tokens == 3 and np.allclose(embedded.data[0].embedding, unit(ids, 3))
        raw = await post(server, "/v1/embeddings", {"input": "x", "normalize": False})
        assert np.allclose(raw["data"][0]["embedding"], vector(ids))
    async with start() as server:
        refused = await post(server, "/v1/embeddings", {"input": "x"}, 400)
        assert "doesn't give embeddings here; it can: draw tokens" in refused["error"]["message"]


async def test_answers_have_the_shapes_that_are_documented(start, tokenizer):
    async with start(pooling=EMBEDS) as server:
        schema_vectors.EmbeddingResponse.model_validate(await post(server, "/v1/embeddings", {"input": ["a", "b"]}))
        pooled = await post(server, "/pooling", {"input": "a", "request_id": "mine", "encoding_format": "float"})
        schema_vectors.PoolingResponse.model_validate(pooled)
        assert pooled["id"] == "pool-mine" and np.allclose(pooled["data"][0]["data"], unit(tokenizer.encode("a")))
        for path in ("/v1/score", "/score"):
            scored = await post(server, path, {"text_1": "a", "text_2": ["a", "b"], "user": "me"})
            schema_vectors.ScoreResponse.model_validate(scored)
        a, b = unit(tokenizer.encode("a")), unit(tokenizer.encode("b"))
        assert np.allclose([s["score"] for s in scored["data"]], [1, a @ b], atol=1e-6)
        for names in (("data_1", "data_2"), ("queries", "documents")):
            again = await post(server, "/score", {names[0]: ["a", "b"], names[1]: ["b", "a"]})
            assert np.allclose([s["score"] for s in again["data"]], [a @ b, a @ b])
        for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
            body = {"query": "a", "documents": ["b", {"text": "a"}, "a b"], "top_n": 2}
            ranked = await post(server, path, body)
            schema_vectors.RerankResponse.model_validate(ranked)
        assert ranked["results"][0] == {"index": 1, "document": {"text": "a"}, "relevance_score": pytest.approx(1)}
        assert len(ranked["results"]) == 2
        bare = await post(server, "/rerank", {**body, "return_documents": False, "top_n": 0})
        assert len(bare["results"]) == 3 and bare["results"][0]["document"] is None
        scores = [result["relevance_score"] for result in bare["results"]]
        assert scores == sorted(scores, reverse=True)


async def test_labels(start, tokenizer):
    ids = tokenizer.encode("a")
    probs = np.exp(vector(ids)) / np.exp(vector(ids)).sum()
    async with start(pooling=CLASSES) as server:
        found = await post(server, "/classify", {"input": ["a", "b"]})
        schema_vectors.ClassificationResponse.model_validate(found)
        assert np.allclose(found["data"][0]["probs"], probs, atol=1e-6)
        assert found["data"][0]["label"] == LABELS[int(probs.argmax())] and found["data"][0]["num_classes"] == WIDTH
        for off in ("activation", "use_activation", "softmax"):
            raw = await post(server, "/classify", {"input": "a", off: False})
            assert np.allclose(raw["data"][0]["probs"], vector(ids))
        pooled = await post(server, "/pooling", {"input": "a"})
        assert np.allclose(pooled["data"][0]["data"], probs, atol=1e-6)
        for path, body in (("/v1/embeddings", {"input": "a"}), ("/pooling", {"input": "a", "task": "embed"}),
                           ("/score", {"text_1": "a", "text_2": "b"})):  # fmt: skip
            assert (await post(server, path, body, 400))["error"]["code"] == "unsupported_task"
        asked = await post(server, "/pooling", {"input": "a", "dimensions": 2}, 400)
        assert asked["error"]["param"] == "dimensions"


async def test_pairs_are_looked_at_together(start, tokenizer):
    async with start(pooling=PAIRS) as server:
        scored = await post(server, "/score", {"text_1": "one", "text_2": ["two", "three"]})
        prompts = [message.prompt for message in server.engine.submitted]
        assert (
            prompts == [tokenizer.encode("onetwo"), tokenizer.encode("onethree")]
            or [tokenizer.encode("one") + tokenizer.encode(t) for t in ("two", "three")] == prompts
        )
        wanted = [1 / (1 + np.exp(-vector(prompt)[0])) for prompt in prompts]
        assert np.allclose([s["score"] for s in scored["data"]], wanted)
        await post(server, "/rerank", {"query": "one", "documents": ["two three four five"], "max_tokens_per_doc": 2})
        head = tokenizer.encode("two three four five")[:2]
        assert server.engine.submitted[-1].prompt == tokenizer.encode("one") + head
        long = "two three " * 20_000
        await post(server, "/rerank", {"query": "one", "documents": [long], "max_tokens_per_doc": 2})
        assert server.engine.submitted[-1].prompt == tokenizer.encode("one") + head


async def test_texts_are_cut_where_that_was_asked_for(start, tokenizer):
    async with start(pooling=EMBEDS) as server:
        long = "word " * 600
        refused = await post(server, "/v1/embeddings", {"input": ["x", long]}, 400)
        assert refused["error"]["code"] == "context_length_exceeded" and "at most 512" in refused["error"]["message"]
        assert not server.engine.submitted
        ids = tokenizer.encode(long)
        for count, given in ((-1, long), (7, long), (7, ids)):
            cut = await post(server, "/v1/embeddings", {"input": given, "truncate_prompt_tokens": count})
            assert cut["usage"]["prompt_tokens"] == (512 if count == -1 else count)
            assert server.engine.submitted[-1].prompt == ids[: 512 if count == -1 else count]


async def test_a_conversation_is_embedded(start):
    async with start(pooling=EMBEDS) as server:
        messages = [{"role": "user", "content": "Hello"}]
        asked = await post(server, "/tokenize", {"messages": messages, "add_generation_prompt": False})
        found = await post(server, "/v1/embeddings", {"messages": messages})
        assert server.engine.submitted[-1].prompt == asked["tokens"]
        assert found["usage"]["prompt_tokens"] == asked["count"]


EMBED, SCORE, RERANK = "/v1/embeddings", "/v1/score", "/v1/rerank"
BAD = [
    (EMBED, {}, "input", "give either input or messages"), (EMBED, {"input": []}, "input", "empty list"),
    (EMBED, {"input": [""]}, "input", "empty"), (EMBED, {"input": [[]]}, "input", "empty"),
    (EMBED, {"input": [[1], ["x"]]}, "input", "a string, a list of strings"),
    (EMBED, {"input": 5}, "input", "a string"),
    (EMBED, {"input": [99999]}, "input", "0 to 49151"), (EMBED, {"input": ["x"] * 2049}, "input", "2049 entries"),
    (EMBED, {"input": ["x"] * 20000}, "input", "20000 entries"),
    (EMBED, {"input": "x", "messages": [{"role": "user", "content": "x"}]}, "input", "either"),
    (EMBED, {"input": "x", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
    (EMBED, {"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
    (EMBED, {"input": "x", "dimension": 4}, "dimension", "did you mean dimensions"),
    (EMBED, {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least 1"),
    (EMBED, {"input": "x", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "greater than or equal to -1"),
    (EMBED, {"input": "x", "stream": True}, "stream", "unknown field"), (EMBED, b"{", None, "not valid JSON"),
    ("/pooling", {"input": "x", "task": "token_embed"}, "task", "there are embed and classify"),
    (SCORE, {"text_1": "x"}, "text_2", "required"), (SCORE, {}, "text_1", "give text_1 and text_2"),
    (SCORE, {"text_1": [], "text_2": "x"}, "text_1", "empty list"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_2", "as many, or one in text_1"),
    (SCORE, {"text_1": "x", "data_2": "x"}, "text_1", "give text_1 and text_2"),
    (SCORE, {"text_1": 5, "text_2": "x"}, "text_1", "a string or a list of strings"),
    (RERANK, {"query": "x", "documents": []}, "documents", "empty list"),
    (RERANK, {"query": "x", "documents": [5]}, "documents", "documents[0] must be a string"),
    (RERANK, {"query": "x", "documents": [{"image": 1}]}, "documents", "documents[0]"),
    (RERANK, {"documents": ["x"]}, "query", "required"),
    (RERANK, {"query": "x", "documents": ["x"], "top_n": -1}, "top_n", "0"),
    (RERANK, {"query": "x", "documents": ["x"] * 2049}, "documents", "2049 entries"),
]  # fmt: skip


async def test_what_is_refused_costs_nothing(start):
    async with start(pooling=EMBEDS) as server:
        for path, body, param, said in BAD:
            error = (await post(server, path, body, 400))["error"]
            assert error["param"] == param and said in error["message"], (body, error)
            assert error["type"] == "invalid_request_error"
        assert not server.engine.submitted


async def test_an_answer_s_size_is_bounded(start):
    wide = msgspec.structs.replace(EMBEDS, width=1 << 20)
    async with start(pooling=wide) as server:
        error = (await post(server, EMBED, {"input": ["x"] * 9}, 400))["error"]
        assert "at most 8 in one request" in error["message"]
    async with start(pooling=PAIRS) as server:
        size = embeddings.MAX_PAIRED // 1000
        body = {"text_1": "word " * (size // 5 + 1), "text_2": ["x"] * 1000, "truncate_prompt_tokens": 4}
        assert "all pairs have" in (await post(server, SCORE, body, 400))["error"]["message"]


async def test_a_client_that_leaves_frees_everything(start):
    async with start(pooling=EMBEDS) as server:
        server.engine.gate.clear()
        async with server.http() as http:
            task = asyncio.create_task(http.post(EMBED, json={"input": ["a", "b", "c"]}))
            await server.engine.until(lambda: len(server.engine.open) == 3)
            task.cancel()
            await server.engine.until(lambda: len(server.engine.cancelled) == 3)
        server.engine.gate.set()
        assert (await post(server, EMBED, {"input": "a"}))["usage"]["prompt_tokens"] == 1


async def test_an_engine_s_failure_is_an_error_of_the_request(start, tokenizer):
    engine = FakeEngine(tokenizer)
    async with start(engine, pooling=EMBEDS) as server:
        engine.fail_with = "the numbers are not finite"
        error = (await post(server, EMBED, {"input": ["a", "b"]}, 500))["error"]
        assert error["message"] == "the numbers are not finite" and error["code"] == "engine_error"
        assert len(engine.submitted) + len(engine.cancelled) >= 2
        engine.fail_with, engine.knows_vectors = None, False
        error = (await post(server, EMBED, {"input": ["a", "b"]}, 500))["error"]
        assert error["message"] == "the engine gave no vector"


async def test_what_is_counted(start, tokenizer):
    async with start(pooling=EMBEDS) as server:
        await post(server, EMBED, {"input": ["one two three", "four"]})
        async with server.http() as http:
            metrics = (await http.get("/metrics")).text
            document = (await http.get("/openapi.json")).json()
        tokens = len(tokenizer.encode("one two three")) + len(tokenizer.encode("four"))
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if line and line[0] != "#")
        counted = {name: float(value) for name, value in lines.items()}
        reason = next(v for k, v in counted.items() if "request_success" in k and f'"{FinishReason.STOP}"' in k)
        prompts = next(v for k, v in counted.items() if "prompt_tokens_total" in k)
        assert reason == 2 and prompts == tokens
        assert {EMBED, "/pooling", "/classify", SCORE, RERANK} <= document["paths"].keys()
        assert "/v2/rerank" not in document["paths"] and json.dumps(document).count("EmbeddingResponse") >= 2
