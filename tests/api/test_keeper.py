"""When an engine's process ends: every sequence goes on in another, once, or is answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from planaria.errors import CapacityError, EngineDead
from planaria.hosts.pool import BackOff
from planaria.server import engine as engine_module
from planaria.server import keeper as module
from planaria.server import questions
from planaria.server.engine_client import EngineHandle
from planaria.server.stream import Gap
from planaria.types import Delta, FinishReason
from planaria.wire import Cancel, Dead, EngineStats, Output, Processes, ProcessInfo, Recovery, Shutdown
from tests.api.scripted_process import Client, Config, ScriptedProcess

ROW = ProcessInfo("engine", None, {}, 1, "here", 0, "idle", 1)


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    made = await Client(recovery_limit=5).start()
    yield made
    await made.keeper.close()


async def settle() -> None:
    """Everything that was to happen next has happened."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_open_sequences_go_on_with_the_tokens_they_have(client: Client) -> None:
    client.submit("a", "b", "c")
    client.now.give("a", "b")
    client.now.give("a", "c")
    client.now.give("c", finish=FinishReason.LENGTH)
    await client.replace()
    assert [(s.id, s.output, s.seed, s.prompt) for s in client.now.submitted] == [
        ("a", [100, 101], 7, [1, 2, 3]), ("b", [100], 7, [1, 2, 3]),
    ]  # fmt: skip
    client.now.give("a", "b")
    client.now.give("a", "b", finish=FinishReason.STOP)
    assert client.tokens("a") == [100, 101, 102, 103] and client.tokens("b") == [100, 101, 102]
    assert [client.told[id][-1].finish for id in "abc"] == ["stop", "stop", "length"]
    notice, done, replayed = client.heard
    assert (notice.ranks, notice.phase, notice.seconds) == ([], "step", {}) and "signal 9" in notice.cause
    assert done.seconds["total"] > 0 and (done.requests, done.tokens) == (2, 3 + 2 - 1 + 3 + 1 - 1)
    assert list(done.seconds) == ["detect", "fence", "replace", "regroup", "load", "total"]
    assert 0 < replayed.seconds["first token"] <= replayed.seconds["replay"]
    assert client.engine.stats.step == client.now.step + client.processes[0].step  # counters go on


async def test_the_replay_is_over_when_the_last_goes_on_or_has_ended(client: Client) -> None:
    client.submit("a", "b", "c", "new")
    client.now.give("a", "b", "c")
    await client.replace()
    heard = len(client.heard)
    client.now.give("a", "b", "new")
    client.now.give("a", "b", "new")
    assert len(client.heard) == heard
    client.engine.cancel("c")
    assert len(client.heard) == heard + 1 and "replay" in client.heard[-1].seconds
    client.now.give("a", "new")
    assert len(client.heard) == heard + 1


async def test_a_replay_that_another_death_ends_is_not_told(client: Client) -> None:
    client.submit("a", "b")
    client.now.give("a", "b")
    await client.replace()
    client.now.give("a")
    await client.replace()
    client.now.give("b")
    assert not any("replay" in message.seconds for message in client.heard)
    client.now.give("a")
    assert "replay" in client.heard[-1].seconds


async def test_tokens_that_come_twice_are_dropped_and_a_gap_costs_the_process(client: Client) -> None:
    client.submit("a")
    client.now.say(Delta("a", 0, [5, 6]))
    client.now.say(Delta("a", 0, [5]), Delta("a", 1, [6, 7]), Delta("unknown", 9, [1]))
    assert client.tokens("a") == [5, 6, 7]
    with pytest.raises(Gap, match="skipped tokens 3 to 4 of a"):
        client.now.say(Delta("a", 5, [9]))
    assert client.tokens("a") == [5, 6, 7]


async def test_what_comes_while_no_engine_is_up_waits_its_turn(client: Client) -> None:
    client.submit("a", "b")
    await client.fall()
    client.submit("c")
    client.engine.cancel("a")
    assert client.engine.facts is not None and client.now.sent == []
    assert [row.state for row in await client.keeper.report()] == ["loading"]
    client.now.become_ready()
    assert client.now.has == ["b", "c"]
    assert client.told["a"] == []


async def test_an_engine_that_ends_while_it_loads_is_replaced_too() -> None:
    client = Client(recovery_limit=2)
    await client.keeper.start()
    await client.fall()
    client.now.become_ready()
    assert await client.engine.ready() is client.engine.facts
    assert client.heard[0].phase == "start-up"
    await client.keeper.close()


async def test_the_limit_counts_deaths_without_a_token(client: Client) -> None:
    client.submit("a", "b")
    for _ in range(8):  # as long as tokens come
        client.now.give("a", "b")
        await client.replace()
    client = await Client(recovery_limit=2).start()
    client.submit("a")
    for _ in range(2):
        await client.fall("ended with exit code 3")
    await client.fall("ended with exit code 3")
    assert client.engine.dead is not None and "exit code 3" in client.engine.dead.message
    assert client.told["a"][-1].finish is FinishReason.ERROR and "exit code 3" in (client.error("a") or "")
    client.submit("b")
    assert client.error("b") == client.error("a")


async def test_where_there_may_be_no_other_the_first_death_is_the_end() -> None:
    client = await Client(recovery_limit=0).start()
    client.submit("a")
    await client.fall()
    assert client.error("a") == client.engine.dead.message and len(client.processes) == 1  # type: ignore[union-attr]
    assert client.heard == []


@pytest.mark.parametrize("how", ["no descriptors", "no room"])
async def test_what_is_lacking_for_a_while_is_waited_for(
    client: Client, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors and processes, which other users may have; memory that ranks before it have not let go of."""
    waits: list[float] = []
    client.keeper._pause = BackOff(first=0.01)
    client.submit("a")
    client.now.give("a")

    async def start(process: ScriptedProcess) -> None:
        waits.append(asyncio.get_running_loop().time())
        if len(waits) < 4:
            if how == "no descriptors":
                raise OSError(24, "Too many open files")
            process.hear(Dead("capacity", "no room"))
            process.die("ended with exit code 1", Dead("capacity", "no room"))

    monkeypatch.setattr(ScriptedProcess, "start", start)
    client.now.die()
    async with asyncio.timeout(60):
        while len(waits) < 4:
            await asyncio.sleep(0)
    client.now.become_ready()
    client.now.give("a", finish=FinishReason.STOP)
    assert client.tokens("a") == [100, 101] and client.engine.dead is None
    first, second, third = (after - before for before, after in itertools.pairwise(waits))
    assert first >= 0.01 and second >= 0.02 and third >= 0.04  # the longer, the more did not come up


async def test_what_is_lacking_for_ever_is_an_end(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(process: ScriptedProcess) -> None:
        raise OSError(24, "Too many open files")

    client.submit("a")
    monkeypatch.setattr(ScriptedProcess, "start", start)
    client.now.die()
    async with asyncio.timeout(60):
        while client.engine.dead is None:
            await asyncio.sleep(0)
    assert "Too many open files" in (client.error("a") or "") and len(client.processes) == 1 + 5


async def test_closing_ends_the_wait_for_another_start(client: Client) -> None:
    client.keeper._pause = BackOff(3600.0, 3600.0)
    await client.fall()
    client.now.die()  # before it came up
    await settle()
    async with asyncio.timeout(60):
        await client.keeper.close()
    assert len(client.processes) == 2


async def test_a_successor_that_takes_no_step_makes_no_progress(client: Client) -> None:
    """Its steps count on from those before it."""
    client.submit("a")
    client.now.give("a")
    await client.replace()
    client.now.give("a")
    client.engine.last_progress = 0.0
    client.now.hear(Output([], EngineStats(step=client.now.step)))
    assert client.engine.last_progress == 0.0


@pytest.mark.parametrize(("kind", "error"), [("capacity", CapacityError), ("error", EngineDead)])
async def test_an_engine_that_gave_up_is_not_followed_by_another(kind: str, error: type[Exception]) -> None:
    client = Client()
    await client.keeper.start()
    client.now.hear(Dead(kind, "no room"))
    client.now.die("ended with exit code 1", Dead(kind, "no room"))
    with pytest.raises(error, match="no room"):
        await asyncio.wait_for(client.engine.ready(), 60)
    await settle()
    assert len(client.processes) == 1


async def test_an_engines_own_exception_is_a_fault_like_any(client: Client) -> None:
    client.submit("a")
    crash = Dead("crash", "KeyError: 'x'", "Traceback ...")
    client.now.hear(crash)
    await client.fall("ended with exit code 1", crash)
    client.now.become_ready()
    assert client.now.has == ["a"] and client.told["a"] == []
    assert client.heard[0].cause.endswith("ended with exit code 1: KeyError: 'x'")
    assert client.heard[0].traceback == "Traceback ..."


async def test_a_poisonous_request_is_found_and_the_others_go_on(client: Client) -> None:
    client.submit("a", "poison", "b")
    deaths = 0
    while client.error("poison") is None:
        await settle()
        if "poison" in client.now.has:
            deaths += 1
            alone = client.now.has == ["poison"]
            assert deaths < 3 or alone  # after two deaths together it isn't with others
            await client.replace()
        else:
            client.now.give(client.now.has[0])
    assert deaths == 4 and client.told["poison"][-1].finish is FinishReason.ERROR
    assert "and nothing else" in (client.error("poison") or "")
    while client.now.has:
        await settle()
        for id in client.now.has:
            client.now.give(id, finish=FinishReason.LENGTH if client.now.tokens[id] == 9 else None)
        await settle()
    for id in "ab":
        assert client.tokens(id) == [100 + i for i in range(10)] and client.error(id) is None
    assert not client.engine.quarantine.faults and not client.engine.streams


async def test_suspects_run_one_at_a_time_until_each_got_a_token(client: Client) -> None:
    client.submit("a", "b")
    await client.replace()
    await client.replace()
    assert client.now.has == ["a"]
    client.submit("new")
    assert client.now.has == ["a"]
    client.now.give("a")
    await settle()  # the engine lets go of it
    assert client.now.has == ["b"]
    client.engine.cancel("b")
    await settle()
    assert client.now.has == ["a", "new"]
    client.now.give("a", "new")
    assert client.tokens("a") == [100, 101]


async def test_a_death_while_others_leave_is_not_the_suspects(client: Client) -> None:
    """The one that is to run alone isn't accused of a death at which it was not there."""
    client.submit("a", "b")
    await client.replace()
    await client.replace()
    client.now.give("a")
    assert client.engine.quarantine.running == "b" and client.now.has == ["a"]  # a still leaves
    await client.replace()
    assert client.engine.quarantine.alone == {}


async def test_cancel_reaches_the_engine_once(client: Client) -> None:
    client.submit("a")
    client.engine.cancel("a")
    client.engine.cancel("a")
    assert [m for m in client.now.sent if isinstance(m, Cancel)] == [Cancel("a")]
    await settle()
    assert client.told["a"] == []


async def test_closing_while_another_engine_starts_ends_it(client: Client) -> None:
    client.submit("a")
    await client.fall()
    await client.keeper.close()
    assert client.now.killed and len(client.processes) == 2
    assert client.now.sent == []


async def test_closing_asks_an_engine_that_is_up(client: Client) -> None:
    await client.keeper.close()
    await client.keeper.close()
    assert client.now.sent == [Shutdown()] and not client.now.killed and client.heard == []


async def test_recovering_ranks_may_be_silent_for_long(client: Client) -> None:
    keeper = client.keeper
    assert keeper._most_silent() is None
    client.submit("a")
    assert keeper._most_silent() == 300 + engine_module.MARGIN
    client.now.hear(Recovery(1, [0], "step", "x"))
    assert keeper._most_silent() == engine_module.COMING_UP
    client.now.hear(Recovery(1, [0], "step", "x", seconds={"total": 1.0}))
    assert keeper._most_silent() == 300 + engine_module.MARGIN


# What is said of an engine's processes when the engine itself can't.


async def test_an_engine_that_loads_or_has_ended_is_not_asked(client: Client) -> None:
    for change, state in (("up", "loading"), ("dead", "ended")):
        setattr(client.engine, change, False if change == "up" else Dead("error", "x"))
        (row,) = await client.keeper.report()
        assert (row.role, row.pid, row.state) == ("engine", client.now.pid, state)
    assert client.now.sent == []
    client.engine.up = True


async def test_all_who_ask_hear_the_answer(client: Client) -> None:
    asked = [asyncio.create_task(client.keeper.report()) for _ in range(2)]
    await settle()
    assert len(client.now.sent) == 2
    client.now.hear(Processes([ROW]))
    assert await asyncio.gather(*asked) == [[ROW], [ROW]]
    client.now.hear(Processes([ROW]))  # the second question's answer: nobody waits


async def test_a_silent_engine_is_said_to_be(client: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(questions, "ANSWER_LIMIT", 0.01)
    (row,) = await client.keeper.report()
    assert row.state == "silent for 0.01 s" and not any(client.keeper.questions.waiting.values())
    monkeypatch.setattr(module, "process_state", lambda pid: "T")
    (row,) = await client.keeper.report()
    assert row.state == "stopped"


async def test_an_engine_that_is_always_ahead_leaves_others_their_turn() -> None:
    """What has come is read at once; a reader that only read would never let go of the event loop."""
    heard = 0

    def hear(message: Any) -> None:
        nonlocal heard
        heard += 1

    class Full:
        def recv(self, flags: int = 0) -> bytes | asyncio.Future[bytes]:
            if heard > 200_000:
                raise RuntimeError("nobody else had a turn")
            coming = asyncio.get_running_loop().create_future()
            coming.set_result(said)
            return said if flags else coming

    said = msgspec.msgpack.encode(Output([], EngineStats()))
    handle = EngineHandle(Config.of(), hear)  # type: ignore[arg-type]
    handle._socket = handle._there = Full()  # type: ignore[assignment]
    listening = asyncio.create_task(handle._listen())
    await asyncio.sleep(0.01)
    assert 0 < heard < 200_000 and not listening.done()
    listening.cancel()
