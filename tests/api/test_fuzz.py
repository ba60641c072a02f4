"""The API held against its own document: schemathesis makes requests (valid ones, broken ones) and checks the answers.

No answer is a 5xx, and each has a status, a content type and a body the document knows. A real server in a process
of its own answers; its log must stay free of internal errors.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.api.test_lifecycle import Process

POSITIVE, NEGATIVE = "positive", "negative"
EXAMPLES = {
    "/v1/completions": 30, "/v1/chat/completions": 25, "/v1/responses": 20,
    "/v1/messages": 15, "/v1/messages/count_tokens": 6,
    "/tokenize": 15, "/detokenize": 15,
}  # fmt: skip
# Values of the fields that no document can say enough about; with others nearly every valid request is refused.
KNOWN = {
    "model": "smollm2", "max_tokens": 5, "max_completion_tokens": 5, "min_tokens": 2, "best_of": None, "stream": True,
    "logit_bias": {"5": 1.5}, "stop_token_ids": [5], "stop": ["x"], "bad_words": ["y"], "chat_template_kwargs": {},
    "response_format": {"type": "text"}, "top_logprobs": None, "max_output_tokens": 5, "previous_response_id": None,
    "text": None,
}  # fmt: skip
GOOD = {"messages": [{"role": "user", "content": "hello"}], "prompt": "hello", "tokens": [5, 6], "input": "hello"}
EITHER = {"/tokenize": {"prompt": "hello"}, "/update_weights": {"path": "x"}}  # one of two, which no document can say
PLAIN = (
    "model",
    "messages",
    "input",
    "max_output_tokens",
    "prompt",
    "tokens",
    "max_tokens",
    "stream",
    "stream_options",
)
OPERATIONS = [
    ("POST", "/v1/completions"), ("POST", "/v1/chat/completions"), ("POST", "/v1/messages"),
    ("POST", "/v1/embeddings"), ("POST", "/pooling"), ("POST", "/classify"), ("POST", "/v1/score"),
    ("POST", "/v1/rerank"), ("POST", "/v1/messages/count_tokens"), ("POST", "/tokenize"), ("POST", "/detokenize"),
    ("POST", "/v1/responses"), ("GET", "/v1/responses/{response_id}"), ("DELETE", "/v1/responses/{response_id}"),
    ("POST", "/v1/responses/{response_id}/cancel"), ("GET", "/v1/responses/{response_id}/input_items"),
    ("GET", "/tokenizer_info"), ("GET", "/v1/models"), ("GET", "/v1/models/{model}"), ("GET", "/health"),
    ("GET", "/version"), ("GET", "/metrics"),
    ("GET", "/admin/processes"), ("GET", "/admin/fleet"), ("GET", "/admin/experts"),
    ("POST", "/scale_elastic_ep"), ("POST", "/admin/layout"),
    ("GET", "/is_sleeping"), ("POST", "/sleep"), ("POST", "/wake_up"), ("POST", "/update_weights"),
    ("POST", "/v1/load_lora_adapter"), ("POST", "/v1/unload_lora_adapter"),
    ("GET", "/dashboard"), ("GET", "/dashboard/plotly.min.js"), ("GET", "/admin/dashboard"),
]  # fmt: skip


@pytest.fixture(scope="module")
def fuzzed(tokenizer):
    with Process(log_level="ERROR", facts={"max_model_len": 512}) as process:
        yield process
        assert process.process.poll() is None, "the server ended"
        process.process.terminate()
        assert process.process.wait(60) == 0
        assert process.process.stderr.read() == ""  # no internal error was logged


@pytest.fixture(scope="module")
def schemathesis():
    """Imported by who runs these tests, not by all who collect them."""
    found = pytest.importorskip("schemathesis", reason="schemathesis is not installed")
    found.checks.load_all_checks()
    return found


@pytest.fixture(scope="module")
def document(schemathesis, fuzzed):
    schema = schemathesis.openapi.from_url(fuzzed.url + "/openapi.json")
    schema.validate()
    return schema


def test_every_route_is_here(document):
    found = {(r.ok().method.upper(), r.ok().path) for r in document.get_all_operations()}
    assert found == set(OPERATIONS)


REFUSED = (
    "/v1/embeddings", "/pooling", "/classify", "/v1/score", "/v1/rerank", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
)  # fmt: skip  # here, where a model generates and has no adapters
PARAMETERS = [
    pytest.param(method, path, mode, id=f"{method} {path} {mode}")
    for method, path in OPERATIONS
    for mode in (POSITIVE, NEGATIVE)
    if mode == POSITIVE or path in EXAMPLES  # there is nothing to get wrong in a GET
]


@pytest.mark.parametrize(("method", "path", "mode"), PARAMETERS)
def test_answers_are_as_documented(schemathesis, document, method, path, mode):
    statuses = {}
    accepts_all = schemathesis.checks.CHECKS.get_one("positive_data_acceptance")

    @settings(
        max_examples=EXAMPLES.get(path, 10), deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=document[path][method].as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def run(case) -> None:
        if mode == POSITIVE and isinstance(case.body, dict):
            case.body |= {name: value for name, value in KNOWN.items() if name in case.body}
            if sum(statuses.values()) % 2:  # every other one with little else, so that some must be accepted
                case.body = {name: value for name, value in case.body.items() if name in PLAIN}
            if sum(statuses.values()) % 4 == 1:  # and some of those must be, whatever was drawn
                case.body |= {name: value for name, value in GOOD.items() if name in case.body}
                if path in EITHER:
                    case.body = EITHER[path]
            if not case.body.get("stream"):
                case.body.pop("stream_options", None)
        response = case.call(timeout=20)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
        # What fits the document may still be refused: a prompt too long, an id out of the vocabulary.
        case.validate_response(response, excluded_checks=[accepts_all])

    run()
    if mode == POSITIVE:
        assert statuses.get(200, 0) >= (0 if "{" in path or path in REFUSED else 1), statuses
