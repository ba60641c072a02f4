"""Expert load: GET /admin/experts and its numbers in /metrics."""

from __future__ import annotations

import time

import msgspec

from planaria.wire import ExpertStats


async def test_an_engine_that_balances_nothing_has_no_entry(server):
    async with server.http() as http:
        assert (await http.get("/admin/experts")).json() == {"engines": []}
        assert "planaria:expert_balancedness{" not in (await http.get("/metrics")).text


async def test_loads_maps_and_numbers(server):
    stats = ExpertStats(0.5, 3, 640, time.time() - 100)
    server.engine.stats = msgspec.structs.replace(server.engine.stats, experts=stats)
    async with server.http() as http:
        (engine,) = (await http.get("/admin/experts")).json()["engines"]
        assert 100 <= engine.pop("seconds_since") < 1000
        assert engine == {
            "engine": 0, "ranks": 2, "steps": 3, "balancedness": 0.5, "rearrangements": 3, "rearranging": False,
            "bytes_moved": 640, "bytes_needed": 64,
            "layers": [
                {"layer": 1, "load": [6, 2, 0, 0], "slots": [0, 1, 2, 3], "rank_loads": [8.0, 0.0],
                 "balancedness": 0.5},
            ],
        }  # fmt: skip
        lines = (await http.get("/metrics")).text.splitlines()
        values = {line.split("{")[0]: float(line.split()[-1]) for line in lines if line.startswith("planaria:expert_")}
        assert values.pop("planaria:expert_rearrangement_age_seconds") >= 100
        assert values == {
            "planaria:expert_balancedness": 0.5, "planaria:expert_rearrangements_total": 3,
            "planaria:expert_moved_bytes_total": 640,
        }  # fmt: skip


async def test_before_the_first_rearrangement_there_is_no_age(server):
    server.engine.stats = msgspec.structs.replace(server.engine.stats, experts=ExpertStats(0.25))
    async with server.http() as http:
        text = (await http.get("/metrics")).text
        assert "planaria:expert_balancedness{" in text and "planaria:expert_rearrangement_age_seconds{" not in text
        assert (await http.get("/admin/experts")).json()["engines"][0]["seconds_since"] is None
