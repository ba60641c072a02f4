"""/v1/load_lora_adapter and /v1/unload_lora_adapter: adapters come and go while requests run. Behind the admin key, as
they read folders of this machine."""

from __future__ import annotations

import asyncio
import logging
import time

from starlette.requests import Request
from starlette.responses import Response

from planaria.errors import RequestError
from planaria.server.common import encode_json, read
from planaria.server.loras import LoraRegistry
from planaria.server.schema_fleet import LoadLoraRequest, UnloadLoraRequest
from planaria.server.service import Service

logger = logging.getLogger("planaria.server")


def _registry(service: Service) -> LoraRegistry:
    """Also while its engines sleep. Raises RequestError."""
    service.admit(None, awake=False)
    if service.client.loras is None:
        raise RequestError("this server has no adapters: start it with --enable-lora", code="unsupported_parameter")
    return service.client.loras


async def load_lora_adapter(request: Request) -> Response:
    """Have an adapter under a name; one that has the name now is another's from then on, but for requests that run."""
    service: Service = request.app.state.service
    body = await read(request, LoadLoraRequest)
    registry, began = _registry(service), time.monotonic()
    registry.check(body.lora_name)
    adapter = await asyncio.to_thread(registry.read, body.lora_path)
    added = registry.add(body.lora_name, adapter)
    await registry.changed()
    took, name = time.monotonic() - began, body.lora_name
    message = f"LoRA adapter {name!r} {'added' if added else 'was there'} in {took * 1000:.0f} ms"
    logger.info("%s: rank %d, %.1f MiB, %s", message, adapter.rank, adapter.nbytes / 2**20, adapter.digest[:12])
    value = {"lora_name": name, "digest": adapter.digest, "message": f"Success: {message}."}
    return Response(encode_json(value), media_type="application/json")


async def unload_lora_adapter(request: Request) -> Response:
    """Take an adapter's name away. Requests that run end with it; 404: there is none of that name."""
    service: Service = request.app.state.service
    body = await read(request, UnloadLoraRequest)
    registry, name = _registry(service), body.lora_name
    digest = registry.named[name].digest if name in registry.named else ""
    registry.remove(name)
    await registry.changed()
    message = f"LoRA adapter {name!r} removed"
    logger.info("%s", message)
    value = {"lora_name": name, "digest": digest, "message": f"Success: {message}."}
    return Response(encode_json(value), media_type="application/json")
