"""The document of the API (OpenAPI), made of an application's routes when it is asked for."""

from __future__ import annotations

import inspect
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette

import planaria
from planaria.server import responses, schema, schema_anthropic, schema_fleet, schema_responses, schema_vectors
from planaria.server.app import ApiRoute, Documented
from planaria.server.failure import ANTHROPIC
from planaria.server.gate import OPEN_PATHS
from planaria.server.idempotency import MAX_KEY

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

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Planaria</title>
<link rel="stylesheet" href="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui.css">
</head>
<body>
<div id="api"></div>
<script src="https://cdn.jsdelivr.net/npm/swagger-ui-dist@5/swagger-ui-bundle.js"></script>
<script>SwaggerUIBundle({url: "openapi.json", dom_id: "#api"})</script>
</body>
</html>
"""


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{model.__name__}"}}}


def _operation(path: str, name: str, about: str, what: Documented) -> dict[str, Any]:
    ok = {**(_json(what.answer) if what.answer is not None else {}), **what.content}
    answers: dict[str, dict[str, Any]] = {"200": {"description": "OK", "content": ok}}
    for status in what.errors:
        shape: type[BaseModel] = schema.HealthReport if path == "/health" else schema.ErrorResponse
        if path.startswith(ANTHROPIC):
            shape = schema_anthropic.AnthropicErrorResponse
        answers[str(status)] = {"description": _ERRORS[status], "content": _json(shape)}
    found: dict[str, Any] = {
        "summary": name.replace("_", " ").title(), "description": about, "operationId": name, "responses": answers,
    }  # fmt: skip
    parameters: list[dict[str, Any]] = [_IDEMPOTENCY_KEY] if 422 in what.errors else []
    for parameter, paths in _PATHS.items():
        if path in paths:
            text = {"type": "string", "minLength": 1}
            parameters.append({"name": parameter, "in": "path", "required": True, "schema": text})
    if what.method == "GET" or what.body is None:
        queries = _QUERIES.get(path, {}) if what.method != "DELETE" else {}
        parameters += [{"name": query, "in": "query", "schema": of_query} for query, of_query in queries.items()]
    if parameters:
        found["parameters"] = parameters
    if what.body is not None:
        found["requestBody"] = {"required": True, "content": _json(what.body)}
    return found


def document(app: Starlette) -> bytes:
    """As JSON. Routes read their bodies themselves, so models are those that are named here."""
    paths: dict[str, dict[str, Any]] = {}
    secured = bool(app.state.service.config.api_keys)
    for route in app.routes:
        if isinstance(route, ApiRoute) and route.documented is not None:
            about = inspect.getdoc(route.endpoint) or ""
            operation = _operation(route.path_format, route.name, about, route.documented)
            if secured and route.path not in OPEN_PATHS:
                operation["security"] = [{"key": []}]
            paths.setdefault(route.path_format, {})[route.documented.method.lower()] = operation
    _, definitions = models_json_schema(
        [(model, "validation") for model in _MODELS], ref_template="#/components/schemas/{model}"
    )
    components: dict[str, Any] = {"schemas": definitions["$defs"]}
    if secured:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    info = {"title": "Planaria", "description": _ABOUT, "version": planaria.__version__}
    return msgspec.json.encode({"openapi": "3.1.0", "info": info, "paths": paths, "components": components})
