"""/admin/... and /scale_elastic_ep: for who runs the server. The gate lets in who has the admin key, or, without one,
this machine."""

from __future__ import annotations

import os
import time
import uuid

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from planaria.core.resize import COMMITTED, ROLLED_BACK, Refused
from planaria.errors import ConfigError, ModelError, RequestError
from planaria.node import node_name, resident_bytes, uptime
from planaria.server.admission import Admission
from planaria.server.common import encode_json, read
from planaria.server.failure import failure
from planaria.server.fleet import Fleet
from planaria.server.fleet_resize import DRAIN_TIMEOUT
from planaria.server.metrics import imbalance
from planaria.server.schema_fleet import LayoutRequest, ScaleRequest, WeightsRequest
from planaria.server.service import Service
from planaria.wire import ProcessInfo

JSON = "application/json"


async def list_processes(request: Request) -> Response:
    """Every process of the deployment: this one, the engine, its ranks."""
    service: Service = request.app.state.service
    rows = await service.control.report()
    return processes(service.model_names[0], kind_of(service), not service.not_ready(), service, rows)


def kind_of(service: Service) -> str:
    """How ranks are started, and on what they compute."""
    facts = service.client.facts
    return "" if facts is None else f"{facts.executor} on {facts.device}"


def processes(model: str, kind: str, ready: bool, service: Admission, rows: list[ProcessInfo]) -> Response:
    """These, after this one."""
    pid = os.getpid()
    state = "draining" if service.draining else "ready" if ready else "not ready"
    own = ProcessInfo("server", None, {}, pid, node_name(), None, state, resident_bytes(pid))
    known = [
        msgspec.structs.replace(row, uptime=uptime(row.pid)) if row.uptime is None and row.node == own.node else row
        for row in (own, *rows)
    ]
    return Response(encode_json({"model": model, "kind": kind, "processes": known}), media_type=JSON)


async def show_fleet(request: Request) -> Response:
    """Every engine with its ranks and load, and the latest resizes."""
    service: Service = request.app.state.service
    engines = service.client.engines()
    body = {
        "size": len(engines),
        "imbalance": imbalance(engines),
        "engines": [
            {
                "engine": engine.index, "state": engine.shown, "pid": engine.pid, "ranks": engine.ranks,
                "layout": engine.layout, "epoch": engine.stats.epoch, "running": engine.stats.running,
                "waiting": engine.stats.waiting, "kv_usage": engine.stats.kv_usage, "open": engine.open,
                "load_tokens": engine.load, "misplaced": engine.misplaced, "kind": engine.kind,
            }
            for engine in engines
        ],
        "resizes": list(service.control.resizer.resizes),
    }  # fmt: skip
    return Response(encode_json(body), media_type=JSON)


async def show_experts(request: Request) -> Response:
    """Where experts are and what their load was, of each engine that balances them."""
    engines = await experts_of(request.app.state.service.control)
    return Response(encode_json({"engines": engines}), media_type=JSON)


async def experts_of(control: Fleet) -> list[dict[str, object]]:
    """Of each engine that balances its experts, as /admin/experts says it."""
    return [
        {
            "engine": index, "ranks": loads.num_ranks, "steps": loads.steps, "balancedness": loads.stats.balancedness,
            "rearrangements": loads.stats.rearrangements, "rearranging": loads.rearranging,
            "seconds_since": time.time() - loads.stats.rearranged_at if loads.stats.rearranged_at else None,
            "bytes_moved": loads.stats.bytes_moved, "bytes_needed": loads.bytes_needed, "layers": loads.layers,
        }
        for index, loads in (await control.experts()).items()
    ]  # fmt: skip


async def scale_elastic_ep(request: Request) -> Response:
    """Have another number of engines; answers when they are there, or gone, or when it is known that it can't be.

    400: makes no sense or does not fit; 409: another resize is under way; 500: it was begun and rolled back.
    """
    body = await read(request, ScaleRequest)
    size = body.new_data_parallel_size
    timeout = DRAIN_TIMEOUT if body.drain_timeout is None else body.drain_timeout
    try:
        resizer = request.app.state.service.control.resizer
        done = await resizer.resize(body.id or uuid.uuid4().hex[:8], size, timeout, body.prefill)
    except Refused as e:
        return failure(str(e), 409 if e.busy else 400, param="new_data_parallel_size", code="resize_refused")
    if done.state == ROLLED_BACK:
        return failure(f"resize {done.id} was rolled back: {done.reason}", 500, code="resize_rolled_back")
    assert done.state == COMMITTED
    message = f"Scaled to {size} data parallel engines"
    return Response(encode_json({"message": message, **msgspec.structs.asdict(done)}), media_type=JSON)


async def sleep(request: Request) -> Response:
    """Give memory back until /wake_up: ?level=1 (KV, the default), 2 (weights, too), 0 (nothing is computed). What runs
    goes on after it; new requests get 503. 400: no such level; 409: it can't be done now."""
    given = request.query_params.get("level", "1")
    if given not in ("0", "1", "2"):
        return failure(f"must be 0, 1 or 2, got {given[:40]!r}", 400, param="level", code="invalid_value")
    return await _slept(request, int(given))


async def wake_up(request: Request) -> Response:
    """Have all engines compute again; answers when they do. ?tags=weights alone does nothing until kv_cache follows.
    400: no such tag; 409: it can't be done now."""
    tags = request.query_params.getlist("tags")
    if unknown := sorted(set(tags) - {"weights", "kv_cache"}):
        return failure(f"must be weights or kv_cache, got {unknown[0][:40]!r}", 400, param="tags", code="invalid_value")
    if tags and "kv_cache" not in tags:
        return await is_sleeping(request)
    return await _slept(request, None)


async def is_sleeping(request: Request) -> Response:
    """Whether the engines sleep, and at which level each does."""
    service: Service = request.app.state.service
    engines = [{"engine": index, "level": engine.asleep} for index, engine in sorted(service.client.members.items())]
    return Response(encode_json({"is_sleeping": service.asleep, "engines": engines}), media_type=JSON)


async def _slept(request: Request, level: int | None) -> Response:
    service: Service = request.app.state.service
    if service.control.resizer.busy:
        return failure("a change of the fleet is under way; ask again after it", 409, code="busy")
    found = await service.control.sleep(level)
    for index, slept in found.items():
        if slept.error:
            return failure(f"engine {index}: {slept.error}", 409, code="sleep_refused")
    return await is_sleeping(request)


async def update_weights(request: Request) -> Response:
    """Have the weights of another checkpoint of the same model, or tensors that a process shares; what runs goes on
    with them. Answers when all engines do. 400: they can't be had, those of before stay; 409: another change is under
    way."""
    body = await read(request, WeightsRequest)
    if (body.path is None) == (body.handle is None):
        raise RequestError("give path or handle, one of both", param="path", code="invalid_value")
    param = "path" if body.handle is None else "handle"
    service: Service = request.app.state.service
    fleet = service.control
    if fleet.resizer.busy or fleet.updating.locked():
        return failure("another change of the fleet is under way; ask again after it", 409, code="busy")
    async with fleet.updating:
        try:
            found = await fleet.update_weights(body.path or "", body.handle or "", keep_kv=body.keep_kv)
        except (ConfigError, ModelError) as e:
            return failure(str(e), 400, param=param, code="weights_refused")
    for index, done in found.items():
        if done.error:
            return failure(f"engine {index}: {done.error}", 400, param=param, code="weights_refused")
    engines = [
        {"engine": n, "weights_version": done.number, "seconds": done.seconds, "pause": done.pause}
        for n, done in found.items()
    ]
    return Response(encode_json({"engines": engines}), media_type=JSON)


async def change_layout(request: Request) -> Response:
    """Have every engine's ranks in another layout; answers when requests go on in it, or when it is known that they
    can't.

    400: it can't be had, or does not fit the model; 409: another change is under way.
    """
    body = await read(request, LayoutRequest)
    service: Service = request.app.state.service
    numbers = [engine.index for engine in service.client.engines()]
    try:
        found = await service.control.resizer.resize_engines(body.tensor_parallel_size, body.pipeline_parallel_size)
    except Refused as e:
        return failure(str(e), 409 if e.busy else 400, code="resize_refused")
    failed = next((f"engine {n}: {done.error}" for n, done in zip(numbers, found, strict=False) if done.error), "")
    if failed:
        return failure(failed, 400, code="layout_refused")
    engines = [
        {"engine": n, "layout": done.layout, "seconds": done.seconds} for n, done in zip(numbers, found, strict=True)
    ]
    return Response(encode_json({"engines": engines}), media_type=JSON)
