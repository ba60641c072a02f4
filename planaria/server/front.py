"""Several models behind one port: each has an application of its own, as if it were alone, and here is what comes
before them. A request goes to the model that it names; what doesn't name one goes to the first.

What is wrong with a request is said by its model's application without the model being loaded: only what is to be
computed waits for that. The first request for a model is an exception, since what it can take isn't known until then.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from planaria.errors import RequestError
from planaria.server import admin, dashboard
from planaria.server.admission import Admission, client_left
from planaria.server.app import app_of, guard, say_errors
from planaria.server.background import Background
from planaria.server.common import LONG_BODY, encode_json
from planaria.server.config import ServerConfig
from planaria.server.failure import RETRY_AFTER, failure
from planaria.server.gate import ADMIN_PATHS, RequestInfo, once_more
from planaria.server.health import cards_of, health_of, listed, listed_one
from planaria.server.metrics import Together, exposition
from planaria.server.models import LOADED, ModelTable, ServedModel
from planaria.server.schema import object_of
from planaria.wire import Dead

JSON = "application/json"
RESPONSE = "/v1/responses/"  # what paths begin with that name a stored response
LOADED_ONLY = ("/scale_elastic_ep", "/admin/layout", "/update_weights", "/sleep", "/wake_up")
ADAPTER = "/v1/load_lora_adapter"  # for which the model's limits must be known


class Front(Admission):
    """config: of the port."""

    def __init__(self, config: ServerConfig, table: ModelTable) -> None:
        super().__init__(config)
        self.table, self.models = table, table.models
        self.apps = {model: app_of(model.service) for model in self.models}
        self._background = Background()
        if config.otlp_traces_endpoint is not None:
            from planaria.server.traces import Traces

            self.traces = Traces(config.otlp_traces_endpoint, config.otlp_traces_sampling_ratio)
        for model in self.models:
            model.service.traces, model.service.outer = self.traces, self
            self.apps[model].add_exception_handler(Exception, _pass_on)
            if model.service.client.loras is not None:
                model.service.client.loras.taken = functools.partial(self._others_have, model)
        self.registry = Together([*(model.service.metrics.registry for model in self.models), TableMetrics(table)])

    # -- as the server's life sees it

    @property
    def title(self) -> str:
        return ",".join(model.name for model in self.models)

    @property
    def coming(self) -> bool:
        return all(model.service.coming for model in self.models)

    async def ready(self) -> None:
        await self.table.start()

    def begin(self) -> None:
        for model in self.models:
            if model.service.responses.unfinished:  # of a server before this one
                self._background.start(self._go_on(model))

    async def _go_on(self, model: ServedModel) -> None:
        try:
            async with model.hold():
                await model.service.responses.go_on()
        except RequestError as e:
            for entry in list(model.service.responses.unfinished.values()):
                model.service.responses.end(entry, "failed", f"the server began anew and can't go on with it: {e}")

    @property
    def runs(self) -> bool:
        return any(model.service.runs for model in self.models)

    def look(self) -> Dead | None:
        for model in self.models:
            model.service.look()
        self.table.look()
        return None  # one that has died is loaded anew

    def end(self, dead: Dead) -> None:
        self.drain(dead.message)

    def abort_all(self, message: str, status: int = 503, code: str = "aborted") -> int:
        count = sum(model.service.abort_all(message, status, code) for model in self.models)
        for model in self.models:
            model.refuse_all(message, status, code)
        return count

    def drain(self, reason: str) -> None:
        super().drain(reason)
        for model in self.models:
            model.service.drain(reason)

    async def shut(self) -> None:
        """Once nothing is open: no model is loaded any more, and threads are let go of."""
        self._background.cancel()
        await self.table.close()
        for model in self.models:
            await model.service.responses.close()
            model.service.traces = None
            model.service.close()
        self.close()

    # -- which model is meant

    @property
    def names(self) -> str:
        return ", ".join(name for model in self.models for name in model.service.model_names)

    def named(self, name: str) -> ServedModel:
        """By a name of its own, or of an adapter's. Raises RequestError (404)."""
        for model in self.models:
            if name in model.service.model_names or name == model.service.config.model:
                return model
        for model in self.models:
            if (loras := model.service.client.loras) is not None and name in loras.named:
                return model
        raise RequestError(
            f"model {name[:200]!r} is not served here; there is: {self.names}",
            param="model", code="model_not_found", status=404,
        )  # fmt: skip

    def _responding(self, id: str) -> ServedModel:
        """Whose response that is; of one that nobody knows, the first."""
        return next((model for model in self.models if id in model.service.responses.known), self.models[0])

    def _others_have(self, model: ServedModel, name: str) -> bool:
        try:
            return self.named(name) is not model
        except RequestError:
            return False

    def asked(self, request: Request) -> ServedModel:
        """By ?model=NAME. Raises RequestError."""
        name = request.query_params.get("model")
        if name is None:
            raise RequestError(
                f"several models are served here: say which is meant with ?model=NAME; there is: {self.names}",
                param="model", code="missing_required_parameter",
            )  # fmt: skip
        return self.named(name)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """To the application of the model that is meant. Raises RequestError."""
        info: RequestInfo = scope["planaria"]
        async with contextlib.AsyncExitStack() as held:
            model, receive = await self._meant(scope, receive, held)
            try:
                await self.apps[model](scope, receive, send)
            finally:
                info.admitted = False

    async def _meant(
        self, scope: Scope, receive: Receive, held: contextlib.AsyncExitStack
    ) -> tuple[ServedModel, Receive]:
        """Which model that is, and a request's body once more. held: keeps one that had to be loaded for it."""
        request, path = Request(scope, receive), scope["path"]
        if path.startswith(RESPONSE):
            model = self._responding(path.removeprefix(RESPONSE).partition("/")[0])
        elif path.startswith(ADMIN_PATHS):
            model = self.asked(request)
            if (path.startswith(LOADED_ONLY) and model.state != LOADED) or (path == ADAPTER and not model.known):
                raise RequestError(
                    f"model {model.name!r} is {model.state}: POST /admin/models/load?model=NAME loads it",
                    param="model", code="not_loaded", status=409,
                )  # fmt: skip
        elif scope["method"] != "POST":
            name = request.query_params.get("model")
            model = self.models[0] if name is None else self.named(name)
        elif not (body := await request.body()):
            model, receive = self.models[0], once_more(body, receive)  # which says that there is none
        else:
            work: Callable[[], dict[str, Any]] = lambda: object_of(body)  # noqa: E731
            value = work() if len(body) <= LONG_BODY else await self.in_thread(work, receive)
            name, before = value.get("model"), value.get("previous_response_id")
            if isinstance(name, str):
                model = self.named(name)
            else:
                model = self._responding(before) if isinstance(before, str) else self.models[0]
            if not model.known and (name is None or isinstance(name, str)):
                await self._loaded(model, receive, held)
                scope["planaria"].admitted = True
            receive = once_more(body, receive)
        return model, receive

    async def _loaded(self, model: ServedModel, receive: Receive, held: contextlib.AsyncExitStack) -> None:
        """Have it loaded, so that a request can be checked, unless its client leaves. Raises RequestError."""
        entering = asyncio.ensure_future(held.enter_async_context(model.hold()))
        leaving = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait({entering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not entering.done():
                raise RequestError("the client is gone", status=499, code="aborted")
            entering.result()
        finally:
            leaving.cancel()
            entering.cancel()


def front_app(front: Front) -> ASGIApp:
    """What all models have in common, and the way to each of them."""
    app = Starlette(routes=[
        Route("/health", _health), Route("/metrics", _metrics),
        Route("/v1/models", _list_models), Route("/v1/models/{model:path}", _get_model),
        Route("/admin/processes", _processes), Route("/admin/models", _models), Route("/admin/dashboard", _dashboard),
        Route("/admin/models/load", _load, methods=["POST"]), Route("/admin/models/unload", _unload, methods=["POST"]),
    ])  # fmt: skip
    app.state.front = front
    app.router.default = front.pass_on
    say_errors(app)
    app.add_exception_handler(Exception, _pass_on)
    guard(app, front)
    return app


async def _pass_on(request: Request, error: Exception) -> Response:
    """The gate says it."""
    raise error


# -- routes of all models together


def _state_of(model: ServedModel) -> dict[str, object]:
    return {
        "model": model.name, "state": model.state, "why": model.told, "running": model.running,
        "waiting": len(model.waiting), "loads": model.loads, "load_seconds": model.seconds,
        "idle_seconds": time.monotonic() - model.used if model.idle else 0.0,
        "kept_bytes": model.residence.num_bytes if model.state != LOADED else 0,
    }  # fmt: skip


def _all_of(model: ServedModel) -> dict[str, object]:
    """Also what only operators may know."""
    return _state_of(model) | {"why": model.why}


async def _health(request: Request) -> Response:
    """200 as long as a model can be used, and each that is loaded gets on; the body says how each is."""
    front: Front = request.app.state.front
    there = {model: health_of(model.service) for model in front.models if model.state == LOADED}
    told = [_state_of(model) | {"health": there.get(model)} for model in front.models]
    ready = not front.draining and any(model.known for model in front.models)
    stuck = [model.name for model, said in there.items() if not said["progressing"]]
    why = front.draining or ("" if ready else "no model can be used") or "; ".join(f"{name} is stuck" for name in stuck)
    body = {"live": True, "ready": ready, "progressing": not stuck, "why": why or "ok", "models": told}
    good = ready and not stuck
    return Response(
        encode_json(body), 200 if good else 503, None if good else {"Retry-After": RETRY_AFTER}, media_type=JSON
    )


async def _metrics(request: Request) -> Response:
    front: Front = request.app.state.front
    body, content_type = exposition(front.registry, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


def _cards(request: Request) -> list[dict[str, object]]:
    front: Front = request.app.state.front
    if front.coming:
        raise RequestError("the first model is still being loaded", code="not_ready", status=503)
    found = []
    for model in front.models:
        facts, scheduler = model.service.client.facts, model.residence.fleet.config.scheduler
        found += cards_of(model.service, scheduler.max_model_len if facts is None else facts.max_model_len)
    return found


async def _list_models(request: Request) -> Response:
    return listed(_cards(request))


async def _get_model(request: Request) -> Response:
    return listed_one(_cards(request), request.path_params["model"])


async def _processes(request: Request) -> Response:
    front: Front = request.app.state.front
    found = await asyncio.gather(*(model.residence.fleet.report() for model in front.models))
    rows = [
        msgspec.structs.replace(row, model=model.name)
        for model, own in zip(front.models, found, strict=True) for row in own
    ]  # fmt: skip
    kinds = dict.fromkeys(filter(None, (admin.kind_of(model.service) for model in front.models)))
    names = ", ".join(f"{model.name} ({model.state})" for model in front.models)
    return admin.processes(names, ", ".join(kinds), not front.coming, front, rows)


async def _dashboard(request: Request) -> Response:
    """Of the model that ?model=NAME says, else of the first, and how all of them are."""
    front: Front = request.app.state.front
    model = front.models[0] if request.query_params.get("model") is None else front.asked(request)
    served = [_all_of(model) for model in front.models]
    return await dashboard.shown(model.service, requests=front.requests, served=served)


async def _models(request: Request) -> Response:
    front: Front = request.app.state.front
    return Response(encode_json({"models": [_all_of(model) for model in front.models]}), media_type=JSON)


async def _load(request: Request) -> Response:
    """Answers when it is loaded. One that failed is tried at once."""
    front: Front = request.app.state.front
    model = front.asked(request)
    model.pause.worked()
    async with model.hold():
        pass
    return Response(encode_json(_all_of(model)), media_type=JSON)


async def _unload(request: Request) -> Response:
    """Answers when it is unloaded; 409: something is open in it."""
    front: Front = request.app.state.front
    model = front.asked(request)
    if why := await front.table.unload(model):
        return failure(why, 409, param="model", code="busy")
    return Response(encode_json(_all_of(model)), media_type=JSON)


class TableMetrics(Collector):
    """Which models are loaded."""

    def __init__(self, table: ModelTable) -> None:
        self.table = table

    def collect(self) -> Iterable[Metric]:
        label = ["model_name"]
        loaded = GaugeMetricFamily("planaria:model_loaded", "1 while a model is loaded.", labels=label)
        waiting = GaugeMetricFamily("planaria:model_waiting", "Requests that wait for it to be loaded.", labels=label)
        loads = CounterMetricFamily("planaria:model_loads", "Times that it was loaded.", labels=label)
        for model in self.table.models:
            loaded.add_metric([model.name], model.state == LOADED)
            waiting.add_metric([model.name], len(model.waiting))
            loads.add_metric([model.name], model.loads)
        return loaded, waiting, loads
