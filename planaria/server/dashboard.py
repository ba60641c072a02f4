"""/dashboard: a live page of nodes, ranks, rates and faults. The page holds no data: it asks /admin/dashboard for it,
where the admin rules hold. Its charts are drawn by plotly's script, which the extra `dashboard` brings."""

from __future__ import annotations

import functools
import importlib.util
import time
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response

from planaria import __version__
from planaria.server.admin import experts_of
from planaria.server.common import encode_json
from planaria.server.failure import failure
from planaria.server.health import health_of
from planaria.server.history import Sample
from planaria.server.service import Service

PAGE = Path(__file__).with_name("static") / "dashboard.html"
MISSING = "the dashboard needs a script that is not installed here: pip install 'planaria[dashboard]'"


@functools.cache
def script() -> Path | None:
    """plotly's, as its package carries it."""
    found = importlib.util.find_spec("plotly")  # not imported: only its file is wanted
    if found is None or found.origin is None:
        return None
    path = Path(found.origin).with_name("package_data") / "plotly.min.js"
    return path if path.exists() else None


async def show_dashboard(request: Request) -> Response:
    """The page."""
    if script() is None:
        return failure(MISSING, 501, code="not_installed")
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Cache-Control": "no-store"})


async def dashboard_script(request: Request) -> Response:
    """What draws the page's charts."""
    path = script()
    if path is None:
        return failure(MISSING, 501, code="not_installed")
    return FileResponse(path, media_type="text/javascript", headers={"Cache-Control": "max-age=86400"})


async def dashboard_data(request: Request) -> Response:
    """All that the page shows: processes, health, engines, the last minutes, faults and changes, experts."""
    return await shown(request.app.state.service)


async def shown(service: Service, **more: object) -> Response:
    """All that the page shows of this model; more: of the others."""
    body = {
        "now": time.time(),
        "version": __version__,
        "models": service.model_names,
        "health": health_of(service),
        "requests": service.requests if service.elsewhere is None else service.elsewhere,
        "processes": await service.control.report(),
        "engines": [
            {"engine": e.index, "state": e.shown, "layout": e.layout, "open": e.open, "load_tokens": e.load}
            for e in service.client.engines()
        ],
        "columns": Sample.__struct_fields__,
        "samples": list(service.history.samples),
        "events": list(service.faults.recent),
        "resizes": list(service.control.resizer.resizes),
        "experts": await experts_of(service.control),
        **more,
    }
    return Response(encode_json(body), media_type="application/json", headers={"Cache-Control": "no-store"})
