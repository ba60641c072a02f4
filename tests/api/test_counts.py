"""What several server processes have counted, added up."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from planaria.server import root_serve
from planaria.server.config import ServerConfig
from planaria.server.counts import added, counts_of, put
from planaria.server.faults import FaultLog
from planaria.server.metrics import exposition
from planaria.server.root_messages import Counts
from planaria.server.root_serve import Root
from planaria.server.service import Service
from planaria.types import FinishReason
from planaria.wire import Recovery
from tests.api.fake_engine import FakeEngine


def served(tokens: int, seconds: float) -> Service:
    service = Service(FakeEngine(None), None, ServerConfig())
    service.metrics.generation_tokens = tokens
    service.metrics.success[FinishReason.STOP] += 1
    service.metrics.ttft.observe(seconds)
    service.requests = 1
    return service


async def test_one_process_answers_for_all() -> None:
    parts = [counts_of(served(10, 0.5)), counts_of(served(5, 0.25)), Counts()]  # one has said nothing yet
    total = added(parts)
    assert (total.requests, total.generation_tokens, total.success["stop"], total.open) == (2, 15, 2, {0: (0, 0)})
    root = Service(FakeEngine(None), None, ServerConfig())
    for _ in range(2):  # again adds nothing
        put(total, root)
    text = exposition(root.metrics.registry, "")[0].decode()
    assert 'vllm:generation_tokens_total{model_name="smollm2"} 15.0' in text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="smollm2"} 2.0' in text
    assert 'vllm:time_to_first_token_seconds_count{model_name="smollm2"} 2.0' in text
    assert 'vllm:time_to_first_token_seconds_sum{model_name="smollm2"} 0.75' in text
    assert root.elsewhere == 2


def test_progress_is_that_of_the_one_that_has_not_moved_for_the_longest() -> None:
    assert added([Counts(moved=7.0), Counts(moved=3.0), Counts()]).moved == 3.0  # the last has nothing open
    assert added([Counts(), Counts()]).moved == 0.0


def test_a_loss_costs_what_it_costs_all_of_them() -> None:
    faults = FaultLog(lambda: [0])
    faults.hear(Recovery(0, [], "step", "killed", engine=0))
    faults.replayed(0, 2, 30)  # may be said before and after the root knows that it is over
    faults.hear(Recovery(0, [], "step", "killed", seconds={"total": 1.0}, engine=0))
    faults.replayed(0, 1, 20)
    last = faults.last_fault()
    assert last is not None and (last["requests"], last["replayed_tokens"]) == (3, 50) and faults.replayed_tokens == 50
    faults.hear(Recovery(0, [], "idle", "killed", engine=0))
    last = faults.last_fault()
    assert last is not None and last["requests"] == 0
    assert faults.replayed_tokens == 50


async def test_however_many_ask_each_process_hears_one_question_at_a_time(monkeypatch):
    asked: list[int] = []
    asking = 0

    class Apis:
        report = None
        totals = added([Counts(requests=3)])

        async def count(self) -> None:
            nonlocal asking
            asking += 1
            asked.append(asking)
            await asyncio.sleep(0)
            asking -= 1

    fleet = SimpleNamespace(dispatcher=FakeEngine(None))
    root = Root(fleet, Apis(), ServerConfig())
    monkeypatch.setattr(root_serve, "FRESH", 3600.0)
    root._counted = -3600.0
    await asyncio.gather(*(root._count() for _ in range(50)))
    assert asked == [1] and root.service.elsewhere == 3
    monkeypatch.setattr(root_serve, "FRESH", 0.0)
    await asyncio.gather(*(root._count() for _ in range(3)))
    assert asked == [1] * 4
    root.service.close()
