"""The FastAPI application: routes, their documentation, and errors in one shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import planaria
from planaria.errors import RequestError
from planaria.server import (
    adapters,
    admin,
    anthropic_messages,
    chat,
    completions,
    dashboard,
    embeddings,
    health,
    responses,
    schema,
    schema_anthropic,
    schema_fleet,
    schema_responses,
    schema_vectors,
    tokens,
)
from planaria.server.admission import Admission
from planaria.server.config import ServerConfig
from planaria.server.dispatcher import Dispatcher
from planaria.server.failure import ANTHROPIC, failure, refused
from planaria.server.gate import OPEN_PATHS, Gate
from planaria.server.idempotency import MAX_KEY
from planaria.server.service import Service
from planaria.server.tokenise import Tokenizer

_ERRORS = {
    400: "Refused; the error names the field.",
    401: "No valid API key.",
    403: "From this machine only, unless the server has an admin key.",
    404: "No such model or path.",
    405: "Not this method.",
    409: "Another resize is under way.",
    408: "The body did not come.",
    413: "The body is too large.",
    415: "A browser sent a body that is not declared as JSON.",
    422: "Its Idempotency-Key was sent before with another body or path.",
    500: "The server's fault.",
    501: "What it needs is not installed here.",
    503: "Not ready, or stopping; see Retry-After.",
}

_IDEMPOTENCY_KEY = {
    "name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY},
    "description": "The same key, path and body get the same answer; nothing runs twice.",
}  # fmt: skip

_ABOUT = """The OpenAI API over a Planaria engine.

- A field that would change the answer and isn't supported (response formats other than text, suffix, ...) is
  refused by name, unless its value means "off"; so is a name nobody knows. `null` always means the default.
- A stream has one event for each step of a choice, also where its text is empty because the bytes of a character or
  the beginning of a stop string are held back. The last one of a choice carries `finish_reason`.
- `seed` makes a request repeatable: choice 0 uses it, choice i one derived from it and i, for every prompt alike.
- Errors are `{"error": {"message", "type", "param", "code"}}`, in a stream as an event before `[DONE]`.
- 503 comes with Retry-After: the model is being loaded, or the server is shutting down.
"""


def create_app(client: Dispatcher, tokenizer: Tokenizer | None, config: ServerConfig) -> FastAPI:
    """The application of one server; `app.state.service` is its `Service`.

    Without a tokenizer prompts are token ids, and texts are empty.
    """
    app = app_of(Service(client, tokenizer, config))
    guard(app, app.state.service)
    return app


def app_of(service: Service) -> FastAPI:
    """The routes of one model, without the gate before them."""
    app = FastAPI(
        title="Planaria", version=planaria.__version__, description=_ABOUT, redirect_slashes=False, redoc_url=None
    )
    app.state.service = service
    _routes(app)
    say_errors(app)
    app.openapi = lambda: _openapi(app, bool(service.config.api_keys))  # type: ignore[method-assign]
    return app


def say_errors(app: Starlette) -> None:
    """All in one shape."""
    app.add_exception_handler(RequestError, _on_refused)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _on_http)  # type: ignore[arg-type]


def guard(app: Starlette, service: Admission) -> None:
    """Put what every request passes first before an application."""
    config = service.config
    app.add_middleware(Gate, service=service)
    if config.cors_origins:
        from starlette.middleware.cors import CORSMiddleware

        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.cors_origins),
            allow_methods=list(config.cors_methods),
            allow_headers=list(config.cors_headers),
            allow_credentials=config.cors_credentials,
            expose_headers=["X-Request-Id", "Idempotent-Replayed"],
        )


async def _on_refused(request: Request, error: RequestError) -> Response:
    return refused(error)


async def _on_http(request: Request, error: HTTPException) -> Response:
    method, path = request.method, request.url.path[:200]
    words = {404: f"no such path: {method} {path}", 405: f"{method} is not allowed for {path}"}
    codes = {404: "not_found", 405: "method_not_allowed"}
    status = error.status_code
    return failure(words.get(status, str(error.detail)), status, code=codes.get(status), headers=error.headers)


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def _add(
    app: FastAPI,
    path: str,
    endpoint: Callable[[Request], Any],
    answer: type[BaseModel] | None,
    body: type[BaseModel] | None = None,
    *,
    method: str = "",
    errors: tuple[int, ...],
    content: dict[str, Any] | None = None,
    documented: bool = True,
) -> None:
    """A route as it works and as it is documented. errors: statuses it may answer besides 200."""
    ok = {**(_json(answer) if answer is not None else {}), **(content or {})}
    answers: dict[int | str, dict[str, Any]] = {200: {"description": "OK", "content": ok}}
    for status in errors:
        shape: type[BaseModel] = schema.HealthReport if endpoint is health.health else schema.ErrorResponse
        if path.startswith(ANTHROPIC):
            shape = schema_anthropic.AnthropicErrorResponse
        answers[status] = {"description": _ERRORS[status], "content": _json(shape)}
    extra: dict[str, Any] = {}
    if 422 in errors:
        extra["parameters"] = [_IDEMPOTENCY_KEY]
    method = method or ("GET" if body is None else "POST")
    if body is not None:
        extra["requestBody"] = {"required": True, "content": _json(body)}
    app.add_api_route(
        path, endpoint, methods=[method], response_model=None, response_class=Response, responses=answers,
        openapi_extra=extra, operation_id=endpoint.__name__, include_in_schema=documented,
    )  # fmt: skip
    if method == "GET":
        app.add_api_route(path, endpoint, methods=["HEAD"], response_class=Response, include_in_schema=False)


def _routes(app: FastAPI) -> None:
    stream = {
        "text/event-stream": {
            "schema": {
                "type": "object",
                "description": "With stream: true. One event a step and choice, then usage if asked for, then [DONE].",
                "properties": {"data": {"type": "string", "description": "A chunk as JSON, an error, or [DONE]."}},
                "required": ["data"],
            }
        }
    }

    add = partial(_add, app)
    post = (400, 401, 404, 408, 413, 415, 500, 503)
    once = (*post, 422)
    add(
        "/v1/completions", completions.create_completion, schema.CompletionResponse, schema.CompletionRequest,
        errors=once, content=stream,
    )  # fmt: skip
    add(
        "/v1/chat/completions", chat.create_chat_completion, schema.ChatCompletionResponse,
        schema.ChatCompletionRequest, errors=once, content=stream,
    )  # fmt: skip
    one = "/v1/responses/{response_id}"
    add(
        "/v1/responses", responses.create_response, schema_responses.ResponseObject, schema_responses.ResponsesRequest,
        errors=once, content=stream,
    )  # fmt: skip
    add(one, responses.get_response, schema_responses.ResponseObject, errors=(400, 401, 404, 503), content=stream)
    add(one, responses.delete_response, schema_responses.ResponseDeleted, method="DELETE", errors=post)
    add(f"{one}/cancel", responses.cancel_response, schema_responses.ResponseObject, method="POST", errors=once)
    add(f"{one}/input_items", responses.list_input_items, schema_responses.InputItems, errors=(400, 401, 404, 503))
    add(
        "/v1/messages", anthropic_messages.create_message, schema_anthropic.MessagesResponse,
        schema_anthropic.MessagesRequest, errors=once, content=stream,
    )  # fmt: skip
    add(
        "/v1/messages/count_tokens", anthropic_messages.count_tokens, schema_anthropic.CountTokensResponse,
        schema_anthropic.CountTokensRequest, errors=once,
    )  # fmt: skip
    _vector_routes(add, post)
    add("/tokenize", tokens.tokenize, schema.TokenizeResponse, schema.TokenizeRequest, errors=post)
    add("/detokenize", tokens.detokenize, schema.DetokenizeResponse, schema.DetokenizeRequest, errors=post)
    add("/tokenizer_info", tokens.tokenizer_info, schema.TokenizerInfo, errors=(400, 401, 503))
    add("/v1/models", health.list_models, schema.ModelList, errors=(401, 503))
    add("/v1/models/{model:path}", health.get_model, schema.ModelCard, errors=(401, 404, 503))
    add("/admin/processes", admin.list_processes, schema.ProcessList, errors=(401, 403))
    add("/admin/fleet", admin.show_fleet, schema_fleet.FleetResponse, errors=(401, 403))
    add("/admin/experts", admin.show_experts, schema_fleet.ExpertsResponse, errors=(401, 403))
    add(
        "/scale_elastic_ep", admin.scale_elastic_ep, schema_fleet.ScaleResponse, schema_fleet.ScaleRequest,
        errors=(400, 401, 403, 408, 409, 413, 415, 500),
    )  # fmt: skip
    add(
        "/admin/layout", admin.change_layout, schema_fleet.LayoutResponse, schema_fleet.LayoutRequest,
        errors=(400, 401, 403, 408, 409, 413, 415),
    )  # fmt: skip
    add(
        "/update_weights", admin.update_weights, schema_fleet.WeightsResponse, schema_fleet.WeightsRequest,
        errors=(400, 401, 403, 408, 409, 413, 415),
    )  # fmt: skip
    add("/is_sleeping", admin.is_sleeping, schema_fleet.SleepResponse, errors=(401, 403))
    for path, endpoint in (("/sleep", admin.sleep), ("/wake_up", admin.wake_up)):
        add(path, endpoint, schema_fleet.SleepResponse, method="POST", errors=(400, 401, 403, 409))
    refused = (400, 401, 403, 408, 413, 415, 503)
    add(
        "/v1/load_lora_adapter", adapters.load_lora_adapter, schema_fleet.LoraResponse, schema_fleet.LoadLoraRequest,
        errors=refused,
    )  # fmt: skip
    add(
        "/v1/unload_lora_adapter", adapters.unload_lora_adapter, schema_fleet.LoraResponse,
        schema_fleet.UnloadLoraRequest, errors=(*refused, 404),
    )  # fmt: skip
    page = {"text/html": {"schema": {"type": "string"}}}
    add("/dashboard", dashboard.show_dashboard, None, errors=(501,), content=page)
    add(
        "/dashboard/plotly.min.js", dashboard.dashboard_script, None, errors=(501,),
        content={"text/javascript": {"schema": {"type": "string"}}},
    )  # fmt: skip
    add("/admin/dashboard", dashboard.dashboard_data, schema_fleet.Dashboard, errors=(401, 403))
    add("/health", health.health, schema.HealthReport, errors=(503,))
    add("/version", health.version, schema.Version, errors=())
    add("/metrics", health.metrics, None, errors=(), content={"text/plain": {"schema": {"type": "string"}}})


def _vector_routes(add: Callable[..., None], errors: tuple[int, ...]) -> None:
    """OpenAI's, and vLLM's. Of several paths of one endpoint the first is documented."""
    vectors = schema_vectors
    for paths, endpoint, answer, body in (
        (("/v1/embeddings",), embeddings.create_embedding, vectors.EmbeddingResponse, vectors.EmbeddingRequest),
        (("/pooling",), embeddings.create_pooling, vectors.PoolingResponse, vectors.PoolingRequest),
        (
            ("/classify",), embeddings.create_classification, vectors.ClassificationResponse,
            vectors.ClassificationRequest,
        ),
        (("/v1/score", "/score"), embeddings.create_score, vectors.ScoreResponse, vectors.ScoreRequest),
        (
            ("/v1/rerank", "/v2/rerank", "/rerank"), embeddings.rerank, vectors.RerankResponse,
            vectors.RerankRequest,
        ),
    ):  # fmt: skip
        for path in paths:
            once = (422,) if path.startswith("/v1/") else ()
            add(path, endpoint, answer, body, errors=(*errors, *once), documented=path == paths[0])


_MODELS: tuple[type[BaseModel], ...] = (
    schema.Message, schema.FunctionTool,
    schema_anthropic.AskedMessage, schema_anthropic.AskedBlock, schema_anthropic.AskedTool,
    schema_anthropic.MessagesRequest, schema_anthropic.MessagesResponse, schema_anthropic.CountTokensRequest,
    schema_anthropic.CountTokensResponse, schema_anthropic.AnthropicErrorResponse,
    schema_vectors.EmbeddingRequest, schema_vectors.EmbeddingResponse, schema_vectors.PoolingRequest,
    schema_vectors.PoolingResponse, schema_vectors.ClassificationRequest, schema_vectors.ClassificationResponse,
    schema_vectors.ScoreRequest, schema_vectors.ScoreResponse, schema_vectors.RerankRequest,
    schema_vectors.RerankResponse,
    schema.CompletionRequest, schema.ChatCompletionRequest, schema.TokenizeRequest, schema.DetokenizeRequest,
    schema.CompletionResponse, schema.ChatCompletionResponse, schema.TokenizeResponse, schema.DetokenizeResponse,
    schema.TokenizerInfo,
    schema.ModelList, schema.ModelCard, schema.HealthReport, schema.Version, schema.ProcessList, schema.ErrorResponse,
    schema_responses.InputItem, schema_responses.FunctionCallItem, schema_responses.FunctionCallOutputItem,
    schema_responses.ReasoningItem, schema_responses.ItemReference, schema_responses.DeclaredFunction,
    schema_responses.ResponsesRequest, schema_responses.ResponseObject, schema_responses.ResponseDeleted,
    schema_responses.InputItems,
    schema_fleet.ScaleRequest, schema_fleet.ScaleResponse, schema_fleet.FleetResponse, schema_fleet.LayoutRequest,
    schema_fleet.LayoutResponse, schema_fleet.SleepResponse, schema_fleet.LoadLoraRequest,
    schema_fleet.UnloadLoraRequest, schema_fleet.LoraResponse, schema_fleet.WeightsRequest,
    schema_fleet.WeightsResponse, schema_fleet.ExpertsResponse, schema_fleet.Dashboard,
)  # fmt: skip


_PATHS = {
    "model": ["/v1/models/{model}"],
    "response_id": [f"/v1/responses/{{response_id}}{end}" for end in ("", "/cancel", "/input_items")],
}
_QUERIES: dict[str, dict[str, Any]] = {
    "/sleep": {"level": {"enum": [0, 1, 2]}},
    "/wake_up": {"tags": {"type": "array", "items": {"enum": ["weights", "kv_cache"]}}},
    "/v1/responses/{response_id}": {
        "stream": {"type": "boolean"}, "starting_after": {"type": "integer", "minimum": 0},
    },
    "/v1/responses/{response_id}/input_items": {
        "order": {"enum": ["asc", "desc"]}, "after": {"type": "string"},
        "limit": {"type": "integer", "minimum": 1, "maximum": responses.MAX_PAGE},
    },
}  # fmt: skip


def _openapi(app: FastAPI, secured: bool) -> dict[str, Any]:
    """The API's document. Routes read their bodies themselves, so its models are put in here."""
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
        _, definitions = models_json_schema(
            [(model, "validation") for model in _MODELS], ref_template="#/components/schemas/{model}"
        )
        document.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])
        for name, paths in _PATHS.items():
            parameter = {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for path in paths:
                for operation in document["paths"][path].values():
                    operation["parameters"] = [*operation.get("parameters", ()), parameter]
        for path, query in _QUERIES.items():
            operations = document["paths"][path]
            operations.get("get", operations.get("post")).setdefault("parameters", []).extend(
                {"name": name, "in": "query", "schema": schema} for name, schema in query.items()
            )
        if secured:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                if path not in OPEN_PATHS:
                    for operation in operations.values():
                        operation["security"] = [{"key": []}]
        app.openapi_schema = document
    return app.openapi_schema
