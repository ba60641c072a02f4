"""Several engines behind one client: who gets what, and what becomes of it when an engine ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from planaria.config.data_parallel import engine_config
from planaria.core.resize import Refused
from planaria.env import visible_devices
from planaria.errors import CapacityError
from planaria.server import fleet as fleet_module
from planaria.server.fleet import Fleet
from planaria.server.fleet_resize import OVERHEAD
from planaria.server.stream import Piece, Stream
from planaria.topology.platforms import CUDA
from planaria.types import Delta, FinishReason, SamplingParams
from planaria.wire import Dead, Leaving, Recovery, Shutdown, Submit
from tests.api.scripted_process import Config, ScriptedProcess

END = FinishReason.LENGTH


async def settle() -> None:
    """Everything that was to happen next has happened."""
    for _ in range(8):
        await asyncio.sleep(0)


class Crowd:
    """A fleet of scripted processes, and what its sinks were told."""

    def __init__(self, size: int = 2, **faults: Any) -> None:
        self.processes: dict[int, list[ScriptedProcess]] = {}
        self.fleet = Fleet(Config.of(data_parallel_size=size, **faults), make=self._make)  # type: ignore[arg-type]
        self.heard: list[Recovery] = []
        self.fleet.dispatcher.on_recovery = self.heard.append
        self.told: dict[str, list[Piece]] = {}

    def _make(self, config: Any, hear: Any) -> Any:
        process = ScriptedProcess(config, hear)
        self.processes.setdefault(process.index, []).append(process)
        return process

    def __getitem__(self, index: int) -> ScriptedProcess:
        """The process of now."""
        return self.processes[index][-1]

    async def start(self) -> Crowd:
        await self.fleet.start()
        for processes in self.processes.values():
            processes[-1].become_ready()
        await self.fleet.dispatcher.ready()
        return self

    def submit(self, *ids: str, prompt: int = 3) -> None:
        for id in ids:
            told = self.told[id] = []
            tokens = list(range(len(self.told) * 1000, len(self.told) * 1000 + prompt))
            submit = Submit(id, tokens, SamplingParams(), 7, 50)
            self.fleet.dispatcher.submit(Stream(submit, lambda stream, piece, told=told: told.append(piece)))

    def where(self, id: str) -> list[int]:
        """Engines that have it now."""
        return [i for i in self.processes if self._names(i, id)]

    def _names(self, index: int, id: str) -> list[str]:
        return [name for name in self[index].has if name.split("~")[0] == id and "~warm" not in name]

    def give(self, *ids: str, finish: FinishReason | None = None) -> None:
        """A token to each, wherever it is."""
        for id in ids:
            for index in self.where(id):
                self[index].give(*self._names(index, id), finish=finish)

    async def fall(self, index: int, said: Dead | None = None) -> None:
        before = len(self.processes[index])
        self[index].die(said=said)
        async with asyncio.timeout(60):
            while len(self.processes[index]) == before:
                member = self.fleet.members.get(index)
                if member is None or member.engine.dead is not None:  # it leaves, or none follows
                    break
                await asyncio.sleep(0)
        await settle()

    def tokens(self, id: str) -> list[int]:
        return [token for piece in self.told[id] for token in piece.tokens]

    def errors(self) -> dict[str, str]:
        return {id: told[-1].error for id, told in self.told.items() if told and told[-1].error is not None}


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    made = await Crowd(recovery_limit=5).start()
    yield made
    await made.fleet.close()


async def test_requests_are_spread_and_the_answers_come_back(crowd: Crowd) -> None:
    crowd.submit(*"abcdefgh")
    assert [len(crowd[i].has) for i in (0, 1)] == [4, 4]
    crowd.give(*"abcdefgh")
    crowd.give(*"abcdefgh", finish=END)
    assert all(crowd.tokens(id) == [100, 101] and crowd.told[id][-1].finish is END for id in "abcdefgh")
    client = crowd.fleet.dispatcher
    assert client.stats.generation_tokens == crowd[0].step + crowd[1].step and client.engines()[0].load == 0


async def test_what_an_engine_had_goes_on_in_another_at_once(crowd: Crowd) -> None:
    crowd.submit(*"abcd")
    crowd.give(*"abcd")
    victims = [id for id in "abcd" if crowd.where(id) == [0]]
    assert len(victims) == 2
    await crowd.fall(0)
    assert all(crowd.where(id) == [1] for id in "abcd")  # while engine 0 still loads
    for message in crowd[1].submitted[-2:]:
        assert message.output == [100] and message.seed == 7
    crowd.give(*"abcd")
    crowd.give(*"abcd", finish=END)
    assert all(crowd.tokens(id) == [100, 101, 102] for id in "abcd")
    assert [message.engine for message in crowd.heard] == [0]
    crowd[0].become_ready()
    crowd.submit("e", "f")
    assert {crowd.where("e")[0], crowd.where("f")[0]} == {0, 1}


async def test_ranks_that_begin_anew_are_not_waited_for_either(crowd: Crowd) -> None:
    """And what the old engine says afterwards of what it had is not heard."""
    crowd.submit("a", "b")
    mine = next(id for id in "ab" if crowd.where(id) == [0])
    crowd.give("a", "b")
    crowd[0].hear(Recovery(1, [0], "step", "killed"))
    assert crowd[1].has[-1] == f"{mine}~1"
    assert [state.state for state in crowd.fleet.dispatcher.engines()] == ["recovering", "ready"]
    crowd[0].say(Delta(mine, 1, [7, 7, 7], FinishReason.ERROR, error="late"))
    crowd[1].give(f"{mine}~1")
    assert crowd.tokens(mine) == [100, 101] and not crowd.errors()
    crowd[0].hear(Recovery(1, [0], "step", "killed", seconds={"total": 1.0}))
    assert [state.state for state in crowd.fleet.dispatcher.engines()] == ["ready", "ready"]


async def test_with_nobody_up_requests_wait_for_the_first_that_is(crowd: Crowd) -> None:
    crowd.submit("a", "b")
    crowd.give("a", "b")
    await crowd.fall(0)
    crowd.give("a", "b")
    await crowd.fall(1)
    crowd.submit("c", "d")
    assert not crowd[0].has and not crowd[1].has
    crowd[1].become_ready()
    assert sorted(name.split("~")[0] for name in crowd[1].has) == ["a", "b", "c", "d"]
    crowd.give(*"abcd", finish=END)
    assert crowd.tokens("a") == [100, 101, 102] and crowd.tokens("c") == [100] and not crowd.errors()


async def test_an_engine_that_gives_up_leaves_its_requests_to_the_others(crowd: Crowd) -> None:
    """Also the errors with which it answers them itself."""
    crowd.submit(*"abcd")
    crowd.give(*"abcd")
    names = crowd[0].has
    gone = Dead("error", "no more")
    crowd[0].hear(gone)
    crowd[0].say(*(Delta(name, 1, [], FinishReason.ERROR, error="no more") for name in names))
    await crowd.fall(0, gone)
    assert not crowd.errors() and crowd.fleet.dispatcher.dead is None
    assert [state.state for state in crowd.fleet.dispatcher.engines()] == ["ended", "ready"]
    crowd.submit("e")
    crowd.give(*"abcde", finish=END)
    assert len(crowd.processes[0]) == 1 and not crowd.errors() and all(crowd.told[id][-1].finish for id in "abcde")
    crowd.submit("f")
    crowd[1].hear(gone)
    assert crowd.fleet.dispatcher.dead is not None and crowd.errors() == {"f": "no more"}
    crowd.submit("g")
    assert crowd.errors()["g"] == "no more"


async def test_a_request_that_kills_engines_does_not_go_round(crowd: Crowd) -> None:
    """It takes one engine with it, then another, and there it stays until it is found out."""
    crowd.submit("poison", "a", "b", "c")
    deaths = {0: 0, 1: 0}
    for _ in range(12):
        for index in crowd.where("poison"):
            deaths[index] += 1
            await crowd.fall(index)
        for index in (0, 1):
            if not crowd.fleet.members[index].engine.up:
                crowd[index].become_ready()
        await settle()
        crowd.give("a", "b", "c")
        await settle()
    assert sorted(deaths.values()) == [1, 4] and list(crowd.errors()) == ["poison"]
    crowd.give(*"abc", finish=END)
    for id in "abc":
        assert crowd.tokens(id) == [100 + i for i in range(len(crowd.tokens(id)))] and crowd.told[id][-1].finish is END


async def test_cancel_reaches_the_engine_that_has_it(crowd: Crowd) -> None:
    crowd.submit("a", "b")
    crowd.give("a", "b")
    first = next(id for id in "ab" if crowd.where(id) == [0])
    await crowd.fall(0)
    crowd.fleet.dispatcher.cancel(first)
    crowd.fleet.dispatcher.cancel(first)
    await settle()
    assert crowd.where(first) == [] and crowd.told[first][-1].finish is None
    assert crowd.fleet.dispatcher.engines()[1].open == 1


async def test_a_start_is_all_or_nothing() -> None:
    crowd = Crowd()
    await crowd.fleet.start()
    crowd[0].become_ready()
    crowd[1].hear(Dead("capacity", "no room"))
    crowd[1].die(said=Dead("capacity", "no room"))
    with pytest.raises(CapacityError, match="no room"):
        await crowd.fleet.dispatcher.ready()
    assert crowd.fleet.dispatcher.dead is not None and crowd.fleet.dispatcher.facts is None
    await crowd.fleet.close()


async def test_facts_and_processes_are_of_all(crowd: Crowd) -> None:
    assert crowd.fleet.dispatcher.facts is not None
    assert crowd.fleet.dispatcher.facts.layout == "dp=2 tp1" and crowd.fleet.dispatcher.facts.ranks == [1, 1]
    for member in crowd.fleet.members.values():
        member.engine.up = False
    assert [row.coordinates for row in await crowd.fleet.report()] == [{"dp": 0}, {"dp": 1}]
    for member in crowd.fleet.members.values():
        member.engine.up = True


# Another size.


class Scaled(Crowd):
    """A crowd whose new engines become ready by themselves, unless they are told how to fail."""

    fate: Dead | None = None
    size = 2

    def _make(self, config: Any, hear: Any) -> Any:
        process = super()._make(config, hear)
        if len(self.processes) > self.size:
            asyncio.get_running_loop().call_soon(self._begin, process)
        return process

    def _begin(self, process: ScriptedProcess) -> None:
        if self.fate is None:
            process.become_ready()
        else:
            process.hear(self.fate)
            process.die(said=self.fate)

    async def warm(self) -> None:
        """Engines compute what they were asked to have in their prefix caches, until there is nothing more."""
        await settle()
        await settle()
        while names := [(i, name) for i in self.processes for name in self[i].has if "~warm" in name]:
            for i, name in names:
                self[i].give(name, finish=END)
            await settle()


@pytest.fixture
async def scaled() -> AsyncIterator[Scaled]:
    made = await Scaled(recovery_limit=2).start()  # type: ignore[assignment]
    assert isinstance(made, Scaled)
    yield made
    await made.fleet.close()


async def test_more_engines_get_work_when_all_are_up(scaled: Scaled) -> None:
    scaled.submit("a", "b")  # one each: nobody has two more than another
    done = await scaled.fleet.resizer.resize("x", 4, 0)
    assert (done.state, done.start, done.phase) == ("committed", [2, 3], "") and done.phases["start"] >= 0
    scaled.submit(*"cdefghij")
    assert {scaled.where(id)[0] for id in "abcdefghij"} == {0, 1, 2, 3}
    assert (await scaled.fleet.resizer.resize("x", 4, 0)) is done and len(scaled.processes) == 4
    assert scaled.fleet.dispatcher.facts is not None and scaled.fleet.dispatcher.facts.layout == "dp=4 tp1"


async def test_engines_that_cant_come_up_leave_no_trace(scaled: Scaled) -> None:
    scaled.submit("a", "b")
    scaled.fate = Dead("capacity", "no memory for KV")
    done = await scaled.fleet.resizer.resize("x", 4, 0)
    assert (done.state, done.reason) == ("rolled back", "no memory for KV")
    assert sorted(scaled.fleet.members) == [0, 1] and scaled.fleet.dispatcher.dead is None and not scaled.errors()
    scaled.fate = None
    assert (await scaled.fleet.resizer.resize("x", 4, 0)) is done  # the same answer
    assert (await scaled.fleet.resizer.resize("y", 3, 0)).state == "committed"


async def test_a_second_change_is_refused_while_one_is_on(scaled: Scaled) -> None:
    scaled.submit("a", "b")
    one = asyncio.create_task(scaled.fleet.resizer.resize("x", 1, 60))
    await settle()
    assert [state.shown for state in scaled.fleet.dispatcher.engines()] == ["ready", "leaving"]
    with pytest.raises(Refused, match=r"resize x from 2 to 1 engines is under way \(drain\)"):
        await scaled.fleet.resizer.resize("y", 3, 0)
    same = asyncio.create_task(scaled.fleet.resizer.resize("x", 1, 60))
    scaled.give("a", "b", finish=END)
    assert await one is await same and one.result().state == "committed" and one.result().moved == 0


async def test_an_engine_leaves_when_it_has_nothing_any_more(scaled: Scaled) -> None:
    """It gets no new work from the start, and ends last of all."""
    scaled.submit("a", "b")
    leaving = next(id for id in "ab" if scaled.where(id) == [1])
    task = asyncio.create_task(scaled.fleet.resizer.resize("x", 1, 60))
    await settle()
    scaled.submit("c", "d")
    assert scaled.where("c") == scaled.where("d") == [0]
    scaled.give(leaving)
    await settle()
    assert not task.done() and Shutdown() not in scaled[1].sent
    scaled.give(leaving, finish=END)
    done = await task
    assert Shutdown() in scaled[1].sent and list(done.phases) == ["drain", "migrate", "stop"]
    assert sorted(scaled.fleet.members) == [0] and not scaled.errors()


async def test_what_is_still_there_is_moved_when_the_other_engine_knows_it(scaled: Scaled) -> None:
    """Until then it goes on where it is."""
    scaled.submit("a", "b", "c", "d")
    scaled.give(*"abcd")
    moving = [id for id in "abcd" if scaled.where(id) == [1]]
    task = asyncio.create_task(scaled.fleet.resizer.resize("x", 1, 0))
    await settle()
    first = moving[0]
    (warm,) = [message for message in scaled[0].submitted if message.id.startswith(f"{first}~warm")]
    assert warm.prompt[-1] == 100 and warm.max_tokens == 1
    scaled.give(first)  # one more, where it was
    await scaled.warm()
    done = await task
    assert done.state == "committed" and done.moved == 2 and all(scaled.where(id) == [0] for id in "abcd")
    resumed = next(message for message in scaled[0].submitted if message.id == f"{first}~1")
    assert resumed.output == [100, 101]
    scaled.give(*"abcd", finish=END)
    assert scaled.tokens(first) == [100, 101, 102] and not scaled.errors()
    assert scaled.fleet.dispatcher.stats.step >= scaled[1].step  # what the engine that left has counted still counts


async def test_with_nobody_to_take_over_nobody_leaves(scaled: Scaled) -> None:
    scaled.submit("a", "b")
    scaled.give("a", "b")
    await scaled.fall(0)
    done = await scaled.fleet.resizer.resize("x", 1, 0)
    assert done.state == "rolled back" and "no other engine is up to go on with 2 sequences" in done.reason
    assert [state.shown for state in scaled.fleet.dispatcher.engines()] == ["loading", "ready"]
    scaled.give("a", "b", finish=END)
    assert not scaled.errors()


async def test_an_engine_that_leaves_may_die(scaled: Scaled) -> None:
    scaled.submit("a", "b")
    scaled.give("a", "b")
    task = asyncio.create_task(scaled.fleet.resizer.resize("x", 1, 60))
    await settle()
    await scaled.fall(1)
    done = await task
    assert done.state == "committed" and all(scaled.where(id) == [0] for id in "ab")
    scaled.give("a", "b", finish=END)
    assert scaled.tokens("a") == scaled.tokens("b") == [100, 101]


async def test_a_shutdown_rolls_back(scaled: Scaled) -> None:
    scaled.submit("a", "b")
    task = asyncio.create_task(scaled.fleet.resizer.resize("x", 1, 60))
    await settle()
    scaled.fleet.drain()
    done = await task
    assert (done.state, done.reason) == ("rolled back", "the server is shutting down")
    with pytest.raises(Refused, match="shutting down"):
        await scaled.fleet.resizer.resize("y", 2, 0)
    scaled.give("a", "b", finish=END)
    assert all(scaled.told[id][-1].finish is END for id in "ab")


async def test_an_engine_that_was_given_up_comes_back_with_the_next_resize(scaled: Scaled) -> None:
    scaled[0].hear(Dead("error", "no more"))
    await scaled.fall(0, Dead("error", "no more"))
    task = asyncio.create_task(scaled.fleet.resizer.resize("x", 2, 0))
    await settle()
    scaled[0].become_ready()
    assert (await task).state == "committed"
    assert [state.state for state in scaled.fleet.dispatcher.engines()] == ["ready", "ready"]


async def test_no_more_than_there_is_room_for(scaled: Scaled) -> None:
    scaled.fleet.resizer.available = lambda: 2 * (scaled.fleet.dispatcher.facts.weight_bytes + OVERHEAD)  # type: ignore[union-attr]
    with pytest.raises(Refused, match=r"5 engines don't fit: each needs 0\.20 GiB .*; 4 fit") as refused:
        await scaled.fleet.resizer.resize("x", 5, 0)
    assert not refused.value.busy and len(scaled.processes) == 2
    assert (await scaled.fleet.resizer.resize("y", 4, 0)).state == "committed"


async def test_engines_change_their_layout_one_after_the_other(scaled: Scaled) -> None:
    done = await scaled.fleet.resizer.resize_engines(2, 1)
    assert [(d.layout, d.error) for d in done] == [("tp=2 pp=1", "")] * 2
    assert await scaled.fleet.resizer.resize("x", 3, 0)
    asked = {member.config.parallel.tensor_parallel_size for member in scaled.fleet.members.values()}
    assert asked == {2}, "those that come later have it, too"
    (done,) = await scaled.fleet.resizer.resize_engines(4, 1)
    assert done.error == "4 don't fit"  # nor are the others asked
    assert {member.config.parallel.tensor_parallel_size for member in scaled.fleet.members.values()} == {2}


async def test_one_change_at_a_time_and_an_engine_that_ends_in_it(scaled: Scaled) -> None:
    changing = asyncio.create_task(scaled.fleet.resizer.resize_engines(5, 1))
    await settle()
    with pytest.raises(Refused, match="layout is being changed"):
        await scaled.fleet.resizer.resize("x", 3, 0)
    with pytest.raises(Refused, match="another change"):
        await scaled.fleet.resizer.resize_engines(1, 1)
    scaled[0].die()
    (done,) = await changing
    assert "ended meanwhile" in done.error


# An engine's process is told to end.


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_module, "WHO_ELSE", 0)


async def until_replaced(crowd: Crowd, index: int, before: int = 1) -> None:
    async with asyncio.timeout(60):
        while len(crowd.processes[index]) == before:
            await asyncio.sleep(0)


async def test_an_engine_that_is_told_to_end_is_replaced(scaled: Scaled, at_once: None) -> None:
    scaled.submit("a", "b")
    scaled.give("a", "b")
    first = scaled[1]
    first.hear(Leaving())
    first.hear(Leaving())
    await scaled.warm()
    await until_replaced(scaled, 1)
    assert Shutdown(followed=True) in first.sent and not first.killed and scaled.heard == []  # nothing has failed
    assert all(scaled.where(id) == [0] for id in "ab")
    await settle()
    scaled[1].become_ready()
    scaled.submit(*"cdefgh")
    assert any(scaled.where(id) == [1] for id in "cdefgh")
    scaled.give(*"abcdefgh", finish=END)
    assert scaled.tokens("a") == scaled.tokens("b") == [100, 101] and not scaled.errors()


async def test_the_only_engine_is_replaced_too(at_once: None) -> None:
    crowd = await Crowd(1).start()
    crowd.submit("a")
    crowd.give("a")
    first = crowd[0]

    def end(*, followed: bool) -> None:  # as an engine does that hears Shutdown
        first.say(Delta("a", 1, [], FinishReason.ABORT))
        first.die("ended with exit code 0")

    first.end = end  # type: ignore[method-assign]
    first.hear(Leaving())
    await until_replaced(crowd, 0)
    crowd.submit("b")
    await settle()
    crowd[0].become_ready()
    crowd.give("a", "b", finish=END)
    assert crowd.tokens("a") == [100, 101] and crowd.tokens("b") == [100] and not crowd.errors()
    await crowd.fleet.close()


async def test_a_signal_to_all_is_the_servers_own_matter(scaled: Scaled) -> None:
    scaled.submit("a", "b")
    for process in (scaled[0], scaled[1]):
        process.hear(Leaving())
    with pytest.raises(Refused, match="engine 0 was told to end and is being replaced"):
        await scaled.fleet.resizer.resize("x", 3, 0)
    scaled.fleet.drain()
    async with asyncio.timeout(60):
        while scaled.fleet.replacing:
            await asyncio.sleep(0.01)
    assert Shutdown() not in [*scaled[0].sent, *scaled[1].sent]


async def test_a_new_engine_takes_its_share_of_what_runs(scaled: Scaled) -> None:
    scaled.submit(*"abcdef")
    scaled.give(*"abcdef")
    before = {id: scaled.where(id)[0] for id in "abcdef"}
    task = asyncio.create_task(scaled.fleet.resizer.resize("x", 3, 0))
    await scaled.warm()
    done = await task
    assert list(done.phases) == ["start", "balance"] and done.moved == 2
    assert [len(scaled[i].has) for i in range(3)] == [2, 2, 2]
    moved = [id for id in "abcdef" if scaled.where(id) == [2]]
    assert {before[id] for id in moved} == {0, 1}
    scaled.give(*"abcdef", finish=END)
    assert all(scaled.tokens(id) == [100, 101] for id in "abcdef") and not scaled.errors()


async def test_an_engine_that_comes_back_does_too(scaled: Scaled) -> None:
    scaled.submit(*"abcd")
    scaled.give(*"abcd")
    await scaled.fall(0)
    scaled.give(*"abcd")
    assert len(scaled[1].has) == 4
    scaled[0].become_ready()
    await scaled.warm()
    assert [len(scaled[i].has) for i in range(2)] == [2, 2]
    scaled.give(*"abcd", finish=END)
    assert all(scaled.tokens(id) == [100, 101, 102] for id in "abcd") and not scaled.errors()


@pytest.mark.parametrize("balancing", ["data_parallel_external_lb", "data_parallel_hybrid_lb"])
async def test_a_server_whose_engines_others_count_keeps_them(balancing: str) -> None:
    config = Config.of(data_parallel_size=4)
    where = {"data_parallel_rank": 2, "data_parallel_start_rank": 2, "data_parallel_size_local": 2, balancing: True}
    config.parallel = msgspec.structs.replace(config.parallel, **where)  # type: ignore[arg-type]
    crowd = Crowd()
    crowd.fleet = Fleet(config, make=crowd._make)  # type: ignore[arg-type]
    await crowd.start()
    assert sorted(crowd.fleet.members) == ([2] if balancing == "data_parallel_external_lb" else [2, 3])
    with pytest.raises(Refused, match="an outside balancer knows this server's engines"):
        await crowd.fleet.resizer.resize("x", 1, 0)
    await crowd.fleet.close()


def test_each_engine_has_accelerators_of_its_own() -> None:
    config = Config.of(data_parallel_size=3)
    config.parallel = msgspec.structs.replace(config.parallel, tensor_parallel_size=2)
    dealt = [engine_config(config, i, 3, [4, 5, 6, 7, 2, 3]).device.devices for i in range(3)]  # type: ignore[arg-type]
    assert dealt == [(4, 5), (6, 7), (2, 3)]
    assert visible_devices(CUDA, dealt[1]) == {"CUDA_VISIBLE_DEVICES": "6,7"} and visible_devices(CUDA, ()) == {}
    only = engine_config(config, 1, 3, []).device  # type: ignore[arg-type]
    assert only.devices == () and only.sharers == 3


async def test_the_last_engine_is_given_up_while_the_server_drains(crowd: Crowd) -> None:
    crowd.submit("a", "b")
    crowd.fleet.drain()
    for index in (0, 1):
        crowd[index].hear(Dead("error", "no more"))
    assert crowd.fleet.dispatcher.dead is not None and crowd.errors() == {"a": "no more", "b": "no more"}


async def test_a_request_that_comes_while_the_only_engine_that_was_not_given_up_leaves(
    crowd: Crowd, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, end = asyncio.Event(), crowd.fleet.members[1].close

    async def close() -> None:
        await left.wait()
        await end()

    monkeypatch.setattr(crowd.fleet.members[1], "close", close)
    leaving = asyncio.create_task(crowd.fleet.remove(1))
    try:
        await settle()
        crowd[0].hear(Dead("error", "its device is gone"))
        assert crowd.fleet.members[0].engine.dead is not None and crowd.fleet.dispatcher.dead is None
        crowd.submit("a")
        assert "no engine is left" in crowd.errors()["a"]
    finally:
        left.set()
    await leaving
    crowd.submit("b")
    assert crowd.errors()["b"] == "its device is gone"


async def test_the_only_engine_of_a_server_has_its_number() -> None:
    config = Config.of(data_parallel_size=4)
    config.parallel = msgspec.structs.replace(config.parallel, data_parallel_rank=2, data_parallel_external_lb=True)
    crowd = Crowd()
    crowd.fleet = Fleet(config, make=crowd._make)  # type: ignore[arg-type]
    await crowd.start()
    crowd.fleet.members[2].engine.up = False  # it isn't asked
    assert [row.coordinates for row in await crowd.fleet.report()] == [{"dp": 2}]
    assert [state.index for state in crowd.fleet.dispatcher.engines()] == [2]
    crowd.fleet.members[2].engine.up = True
    await crowd.fleet.close()


async def test_the_end_needs_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ended: list[str] = []
    crowd = Crowd(1)
    await crowd.fleet.start()
    crowd.fleet.local = SimpleNamespace(close=lambda: ended.append("forks"))  # type: ignore[assignment]
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        await crowd.fleet.close()
    assert ended == ["forks"]
