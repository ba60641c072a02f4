"""What /health and /metrics say of faults, while they are dealt with and afterwards."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from planaria.server.faults import PARTS
from planaria.wire import EngineStats, Recovery, Travel
from tests.api.test_metrics import scrape

C = "/v1/completions"
NOTICE = Recovery(1, [1], "step", "its process was killed by signal 9", "Traceback ...")
DONE = msgspec.structs.replace(
    NOTICE, seconds={"fence": 0.01, "load": 0.5, "total": 0.75}, layout="tp=2 pp=1", pids=[7, 8], requests=1, tokens=90
)
REPLAYED = msgspec.structs.replace(DONE, seconds=DONE.seconds | {"first token": 0.1, "replay": 0.25})


async def test_health_explains_a_recovery(server: Any) -> None:
    engine = server.engine
    async with server.http() as http:
        assert (await http.get("/health")).json()["last_fault"] is None
        engine.on_recovery(NOTICE)
        answer = await http.get("/health")
        body = answer.json()
        assert answer.status_code == 200 and body["live"] and body["ready"] and body["progressing"]
        assert body["recovering"] is True
        assert body["why"].startswith("recovering for ") and "rank 1 failed in step: its process was" in body["why"]
        assert body["last_fault"]["recovered"] is False and body["last_fault"]["seconds"] == {}
        engine.on_recovery(DONE)
        engine.stats = EngineStats(epoch=1)
        body = (await http.get("/health")).json()
        assert (body["recovering"], body["why"], body["epoch"], body["engine_restarts"]) == (False, "ok", 1, 0)
        when = body["last_fault"].pop("when")
        assert when.endswith("Z") and len(when) == len("2026-01-01T00:00:00.000Z")
        assert body["last_fault"] == {
            "part": "rank", "engine": 0, "ranks": [1], "phase": "step", "cause": "its process was killed by signal 9",
            "recovered": True, "epoch": 1, "layout": "tp=2 pp=1",
            "seconds": {"fence": 0.01, "load": 0.5, "total": 0.75}, "experts": None, "requests": 1,
            "replayed_tokens": 90,
        }  # fmt: skip


async def test_a_replay_is_told_when_it_is_over(server: Any) -> None:
    """It adds to the fault it belongs to, is no other one, and never takes the place of a later one."""
    engine = server.engine
    async with server.http() as http:
        for message in (NOTICE, DONE, REPLAYED):
            engine.on_recovery(message)
        body = (await http.get("/health")).json()
        assert body["last_fault"]["seconds"] == REPLAYED.seconds and body["last_fault"]["recovered"]
        engine.on_recovery(msgspec.structs.replace(NOTICE, epoch=2))
        engine.on_recovery(REPLAYED)
        body = (await http.get("/health")).json()
        assert body["recovering"] and body["last_fault"]["epoch"] == 2
        _, values = await scrape(http)
        assert values["planaria:faults_total/rank"] == 2 and values["planaria:recoveries_total/rank"] == 1
        spent = {name: values[f"planaria:recovery_part_seconds_total/{name}"] for name in PARTS}
        assert spent == {"detect": 0, "fence": 0.01, "replace": 0, "regroup": 0, "load": 0.5, "replay": 0.5}


async def test_a_recovery_that_lasts_is_no_progress(start: Any) -> None:
    """It is a pause like any other: too long a one makes the verdict bad, and the reason is given."""
    async with start(stall_timeout=0.05) as server, server.http() as http:
        engine = server.engine
        engine.gate.clear()
        task = asyncio.create_task(http.post(C, json={"prompt": "x", "max_tokens": 3}))
        await engine.until(lambda: engine.open)
        engine.on_recovery(NOTICE)
        async with asyncio.timeout(60):
            while (answer := await http.get("/health")).status_code == 200:
                pass
        body = answer.json()
        assert body["live"] and body["ready"] and not body["progressing"]
        assert body["why"].startswith("recovering for ") and "no step for" in body["why"]
        engine.on_recovery(DONE)
        engine.gate.set()
        assert (await task).status_code == 200


async def test_a_dead_engine_is_not_recovering(server: Any) -> None:
    async with server.http() as http:
        server.engine.on_recovery(NOTICE)
        server.engine.die("the end")
        body = (await http.get("/health")).json()
        assert not body["live"] and not body["recovering"] and "the end" in body["why"]


async def test_metrics_count_faults(server: Any) -> None:
    engine = server.engine
    async with server.http() as http:
        engine.on_recovery(NOTICE)
        _, values = await scrape(http)
        assert values["planaria:faults_total/rank"] == 1 and values["planaria:faults_total/engine"] == 0
        assert values["planaria:recoveries_total/rank"] == 0 and values["planaria:recovering"] == 1
        engine.on_recovery(DONE)
        for message in (NOTICE, DONE):
            engine.on_recovery(msgspec.structs.replace(message, ranks=[], epoch=0))
        _, values = await scrape(http)
        assert [values[f"planaria:{name}_total/{part}"] for name in ("faults", "recoveries")
                for part in ("rank", "engine")] == [1, 1, 1, 1]  # fmt: skip
        assert values["planaria:replayed_tokens_total"] == 180 and values["planaria:recovery_seconds_total"] == 1.5
        assert values["planaria:recovering"] == 0
        body = (await http.get("/health")).json()
        assert body["engine_restarts"] == 1 and body["last_fault"]["part"] == "engine"


async def test_a_change_of_the_layout_is_no_fault(server: Any) -> None:
    engine = server.engine
    change = Recovery(2, [], "idle", "the layout becomes tp=2: there are devices for it again", kind="layout")
    async with server.http() as http:
        engine.on_recovery(change)
        assert "the layout becomes tp=2" in (await http.get("/health")).json()["why"]
        travel = Travel(300, 200, 1)
        engine.on_recovery(msgspec.structs.replace(change, seconds={"total": 1.5}, layout="tp=2 pp=1", travel=travel))
        body = (await http.get("/health")).json()
        assert body["last_fault"] is None and not body["recovering"] and body["engine_restarts"] == 0
        assert (body["last_layout_change"]["layout"], body["last_layout_change"]["seconds"]) == (
            "tp=2 pp=1", {"total": 1.5}
        )  # fmt: skip
        _, values = await scrape(http)
        assert values["planaria:faults_total/engine"] == 0 and values["planaria:layout_changes_total"] == 1
        assert body["last_layout_change"]["experts"] == {"moved": 300, "needed": 200, "read": 1}
        assert [values[f"planaria:recovery_{name}_total"] for name in (
            "expert_moved_bytes", "expert_needed_bytes", "experts_read"
        )] == [300, 200, 1]  # fmt: skip
