"""GET /health, /version, /v1/models, /metrics. Health means progress, and the body says why it isn't given.

Live: the event loop turns (the answer is the proof) and the engine has not ended. Ready: it can admit. Progressing:
nothing is queued, or steps are being taken. A recovery is a pause like any other: the body says that one is on and why,
and it counts as no progress only when it has lasted for as long as any pause may (`stall_timeout`).
"""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

import planaria
from planaria.errors import RequestError
from planaria.server.common import encode_json
from planaria.server.failure import RETRY_AFTER
from planaria.server.metrics import exposition
from planaria.server.service import Service
from planaria.wire import TransferStats


def health_of(service: Service) -> dict[str, object]:
    """The body of /health."""
    client = service.client
    live = client.dead is None
    recovering = live and service.faults.recovering
    why = [reason for reason in (service.not_ready(), service.faults.why() if recovering else "") if reason]
    progressing = live
    stats = client.stats
    opened = service.open or any(engine.open for engine in client.engines())
    if live and (opened or stats.running or stats.waiting):
        moved = max(client.last_progress, service.busy_since)
        still = time.monotonic() - moved
        if still > service.config.stall_timeout:
            progressing = False
            why.append(f"no step for {still:.0f} s with {stats.running} sequences running and {stats.waiting} waiting")
    return {
        "live": live, "ready": not service.not_ready(), "progressing": progressing, "why": "; ".join(why) or "ok",
        "recovering": recovering, "epoch": stats.epoch, "engine_restarts": service.faults.recoveries["engine"],
        "last_fault": service.faults.last_fault(), "last_layout_change": service.faults.last_change,
        "prefill_threshold": client.hand_overs.threshold if client.hand_overs.both else None,
        "drafts": client.facts.drafts[0] if client.facts is not None and client.facts.drafts is not None else None,
        "engines": [
            {
                "engine": engine.index, "state": engine.shown,
                "epoch": engine.stats.epoch, "running": engine.stats.running, "waiting": engine.stats.waiting,
                "kv_tier": None
                if (tier := engine.stats.tier) is None
                else {name: store.why or "ok" for name, store in tier.stores.items()},
                "kind": engine.kind, "kv_transfer": _transfers(engine.stats.transfers),
            }
            for engine in client.engines()
        ],
    }  # fmt: skip


def _transfers(stats: TransferStats | None) -> str | None:
    if stats is None:
        return None
    lost = ", ".join(f"{why} {count}" for why, count in sorted(stats.failed.items()))
    return f"computed here instead, at least in part: {lost} of {stats.transfers}" if lost else "ok"


async def health(request: Request) -> Response:
    """Whether requests can be sent here: 200 if live, ready and progressing, else 503."""
    body = health_of(request.app.state.service)
    good = body["live"] and body["ready"] and body["progressing"]
    return Response(
        encode_json(body),
        200 if good else 503,
        None if good else {"Retry-After": RETRY_AFTER},
        "application/json",
    )


async def version(request: Request) -> Response:
    """The server's version."""
    return Response(encode_json({"version": planaria.__version__}), media_type="application/json")


async def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    service: Service = request.app.state.service
    body, content_type = exposition(service.metrics.registry, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


def cards_of(service: Service, max_model_len: int) -> list[dict[str, object]]:
    """Of its names, and of its adapters'."""
    root = service.model_names[0]
    own = {"object": "model", "owned_by": "planaria", "root": root, "max_model_len": max_model_len}
    named = service.client.loras.named.values() if service.client.loras is not None else ()
    return [
        *({"id": name, "created": service.created, **own} for name in service.model_names),
        *(
            {"id": each.name, "created": each.created, **own, "parent": root, "adapter": each.digest}
            for each in named
        ),
    ]  # fmt: skip


async def list_models(request: Request) -> Response:
    """The names this server answers to; 503 until the model can be used."""
    service: Service = request.app.state.service
    return listed(cards_of(service, service.admit(None).max_model_len))


async def get_model(request: Request) -> Response:
    """One of them."""
    service: Service = request.app.state.service
    return listed_one(cards_of(service, service.admit(None).max_model_len), request.path_params["model"])


def listed(cards: list[dict[str, object]]) -> Response:
    return Response(encode_json({"object": "list", "data": cards}), media_type="application/json")


def listed_one(cards: list[dict[str, object]], name: str) -> Response:
    """Raises RequestError."""
    for card in cards:
        if card["id"] == name:
            return Response(encode_json(card), media_type="application/json")
    raise RequestError(f"model {name[:200]!r} is not served here", param="model", code="model_not_found", status=404)
