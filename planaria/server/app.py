"""The application: routes, what is said of them (`api_document.py` says it), and errors in one shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

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
from planaria.server.failure import failure, refused
from planaria.server.gate import Gate
from planaria.server.service import Service
from planaria.server.tokenise import Tokenizer


def create_app(client: Dispatcher, tokenizer: Tokenizer | None, config: ServerConfig) -> Starlette:
    """The application of one server; `app.state.service` is its `Service`.

    Without a tokenizer prompts are token ids, and texts are empty.
    """
    app = app_of(Service(client, tokenizer, config))
    guard(app, app.state.service)
    return app


def app_of(service: Service) -> Starlette:
    """The routes of one model, without the gate before them."""
    app = Starlette()
    app.router.redirect_slashes = False
    app.state.service = service
    _routes(app)
    say_errors(app)
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


class Documented(NamedTuple):
    """What the API's document says of a route. answer, body: in JSON; errors: statuses that it may answer besides 200;
    content: of 200, in other types."""

    method: str
    answer: type[BaseModel] | None
    body: type[BaseModel] | None
    errors: tuple[int, ...]
    content: dict[str, Any]


class ApiRoute(Route):
    """documented: None: it is in no document."""

    documented: Documented | None = None


def _add(
    app: Starlette,
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
    """A route as it works and as it is documented."""
    method = method or ("GET" if body is None else "POST")
    route = ApiRoute(path, endpoint, methods=[method])
    if documented:
        route.documented = Documented(method, answer, body, errors, content or {})
    app.router.routes.append(route)


async def _document(request: Request) -> Response:
    from planaria.server.api_document import document

    return Response(document(request.app), media_type="application/json")


async def _reader(request: Request) -> Response:
    from planaria.server.api_document import PAGE

    return Response(PAGE, media_type="text/html")


def _routes(app: Starlette) -> None:
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
    app.router.routes += [ApiRoute("/openapi.json", _document), ApiRoute("/docs", _reader)]


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
