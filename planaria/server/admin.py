"""GET /admin/...: for who runs the server. The gate lets in who has the admin key, or, without one, this machine."""

from __future__ import annotations

import os

from starlette.requests import Request
from starlette.responses import Response

from planaria.node import node_name, resident_bytes
from planaria.server.common import encode_json
from planaria.server.service import Service
from planaria.wire import ProcessInfo


async def list_processes(request: Request) -> Response:
    """Every process of the deployment: this one, the engine, its ranks."""
    service: Service = request.app.state.service
    pid = os.getpid()
    state = "draining" if service.draining else "ready" if not service.not_ready() else "not ready"
    own = ProcessInfo("server", None, {}, pid, node_name(), None, state, resident_bytes(pid))
    return Response(encode_json({"processes": [own, *await service.client.report()]}), media_type="application/json")
