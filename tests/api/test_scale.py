"""POST /scale_elastic_ep and GET /admin/fleet: statuses, shapes, and who may."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from planaria.server.app import create_app
from planaria.server.config import ServerConfig
from tests.api.fake_engine import FakeEngine

SCALE = "/scale_elastic_ep"


async def test_a_resize_and_its_answer(server: Any) -> None:
    async with server.http() as http:
        body = {"new_data_parallel_size": 3, "drain_timeout": 7, "id": "mine"}
        answer = await http.post(SCALE, json=body)
        value = answer.json()
        assert answer.status_code == 200 and server.engine.asked == ("mine", 3, 7)
        assert value["message"] == "Scaled to 3 data parallel engines"
        assert (value["id"], value["before"], value["after"], value["state"]) == ("mine", 1, 3, "committed")
        assert (await http.post(SCALE, json={"new_data_parallel_size": 2})).status_code == 200
        id, size, timeout = server.engine.asked
        assert id and size == 2 and timeout == 120


@pytest.mark.parametrize(
    ("size", "status", "code"),
    [(5, 400, "resize_refused"), (9, 409, "resize_refused"), (4, 500, "resize_rolled_back")],
)
async def test_what_is_not_done_is_said(server: Any, size: int, status: int, code: str) -> None:
    """Refused, refused for now, begun and rolled back."""
    async with server.http() as http:
        answer = await http.post(SCALE, json={"new_data_parallel_size": size})
        assert answer.status_code == status and answer.json()["error"]["code"] == code
        assert ("no room" if status == 500 else "4 fit") in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [{}, {"new_data_parallel_size": "2"}, {"new_data_parallel_size": -1}, {"new_data_parallel_size": 2, "x": 1}]
)
async def test_a_wrong_body_is_refused_by_field(server: Any, body: dict[str, Any]) -> None:
    async with server.http() as http:
        answer = await http.post(SCALE, json=body)
        assert answer.status_code == 400 and not hasattr(server.engine, "asked")
        assert ("x" if "x" in body else "new_data_parallel_size") in answer.json()["error"]["message"]


async def test_the_fleet_is_shown(server: Any) -> None:
    async with server.http() as http:
        body = (await http.get("/admin/fleet")).json()
        (engine,) = body["engines"]
        assert body["size"] == 1 and body["imbalance"] == 1.0 and body["resizes"] == []
        assert (engine["engine"], engine["state"], engine["pid"], engine["ranks"]) == (0, "ready", 11, [12])


@pytest.mark.parametrize(
    ("key", "given", "address", "status"),
    [
        (None, None, "127.0.0.1", 200), (None, None, "10.0.0.9", 403), ("sesame", None, "127.0.0.1", 401),
        ("sesame", "user", "127.0.0.1", 401), ("sesame", "sesame", "10.0.0.9", 200),
        (None, "user", "127.0.0.1", 403),
    ],
)  # fmt: skip
async def test_who_may_scale(tokenizer: Any, key: str | None, given: str | None, address: str, status: int) -> None:
    """As /admin: the key of an API user is none."""
    keys = ("user",) if given else ()
    app = create_app(FakeEngine(tokenizer), tokenizer, ServerConfig(admin_key=key, api_keys=keys))
    transport = httpx.ASGITransport(app, client=(address, 1))
    headers = {"authorization": f"Bearer {given}"} if given else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8000", headers=headers) as http:
        assert (await http.post(SCALE, json={"new_data_parallel_size": 2})).status_code == status
        assert (await http.get("/admin/fleet")).status_code == status
    app.state.service.close()
