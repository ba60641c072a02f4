"""An engine's socket with several clients: each hears what is true now and what is its own, and one that has ended
takes its sequences with it."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq

from planaria import engine_port
from planaria.engine_port import Port
from planaria.node import Memories, Shared
from planaria.server.engine_client import EngineConnection
from planaria.types import Delta, FinishReason, SamplingParams
from planaria.wire import Cancel, Dead, EngineFacts, EngineStats, FromEngine, Gone, Output, Recovery, Submit, ToEngine
from tests.api.fake_engine import facts


class Client:
    """A front end's end."""

    def __init__(self, context: zmq.Context[Any], address: str, name: str, room: int = 1000) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, room)
        self.socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)
        self.socket.send(b"")

    def send(self, message: ToEngine) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def hears(self) -> FromEngine:
        assert self.socket.poll(10_000), "nothing came"
        return msgspec.msgpack.decode(self.socket.recv(), type=FromEngine)  # type: ignore[no-any-return, arg-type]


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    port = Port(f"ipc://{tmp_path}/engine")
    yield port
    port.close()


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    context = zmq.Context()
    yield context
    context.destroy(0)


def submit(id: str) -> Submit:
    return Submit(id, [1], SamplingParams(), 0, 9)


def received(port: Port, count: int) -> list[ToEngine]:
    found: list[ToEngine] = []
    end = time.monotonic() + 60
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} came"
        found += port.receive(10_000)  # nothing, where it is a greeting
    return found


def output(step: int, *ids: str, running: int = 2, finish: FinishReason | None = None) -> Output:
    return Output([Delta(id, step, [7], finish) for id in ids], EngineStats(step=step, running=running))


def test_an_engine_whose_memorys_owner_has_ended_crashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that takes another's place dies as its engine comes up: who has the requests starts one of its own, and
    answers nobody with that."""
    with subprocess.Popen(["true"]) as ended:
        pass

    def build(*of: Any, given: Memories, **more: Any) -> None:
        assert given.kv is not None
        given.kv.open()

    monkeypatch.setattr(engine_port, "build_loop", build)
    monkeypatch.setattr(engine_port, "set_title", lambda role, **facts: None)
    said: list[Any] = []
    port: Any = SimpleNamespace(hello=lambda: None, send=said.append, close=lambda: None)
    config: Any = None
    assert engine_port.serve(config, port, threading.Event(), given=Memories(kv=Shared(ended.pid, 3, 1))) == 1
    assert [(type(dead), dead.kind) for dead in said] == [(Dead, "crash")]


def test_who_comes_late_knows_what_is_true_now(port: Port, context: zmq.Context[Any]) -> None:
    first = Client(context, port.address, "first")
    port.hello()
    port.send(facts())
    assert isinstance(first.hears(), EngineFacts)
    port.send(Recovery(1, [0], "step", "lost"))
    port.send(Recovery(1, [0], "step", "lost", seconds={"total": 1.0}, layout="tp=2", pids=[5, 6]))
    port.send(Recovery(2, [1], "step", "lost again"))
    late = Client(context, port.address, "late")
    assert port.receive(10_000) == []
    known = late.hears()
    assert isinstance(known, EngineFacts) and (known.layout, known.ranks) == ("tp=2", [5, 6])
    assert late.hears() == Recovery(2, [1], "step", "lost again")


def test_each_hears_of_its_own(port: Port, context: zmq.Context[Any]) -> None:
    one, two = (Client(context, port.address, name) for name in ("one", "two"))
    port.hello()
    one.send(submit("a"))
    two.send(submit("b"))
    received(port, 2)
    port.send(output(1, "a", "b"))
    for client, id in ((one, "a"), (two, "b")):
        heard = client.hears()
        assert isinstance(heard, Output) and [delta.request_id for delta in heard.deltas] == [id]
    port.send(output(2, "b", finish=FinishReason.STOP, running=0))  # then nothing is left, which all must know
    heard = one.hears()
    while isinstance(heard, Output) and heard.stats.step < 2:
        heard = one.hears()
    assert isinstance(heard, Output) and heard.deltas == [] and heard.stats.running == 0


def test_of_one_that_has_ended_everything_is_cancelled(port: Port, context: zmq.Context[Any]) -> None:
    one, two, root = (Client(context, port.address, name) for name in ("one", "two", "root"))
    port.hello()
    one.send(submit("a"))
    two.send(submit("b"))
    received(port, 2)
    root.send(Gone("one"))
    assert received(port, 1) == [Cancel("a")]
    one.send(submit("late"))  # it was on its way
    two.send(submit("c"))
    assert [message.id for message in received(port, 1)] == ["c"]  # type: ignore[union-attr]
    port.send(output(1, "a", "b", finish=FinishReason.ABORT))
    heard = two.hears()
    assert isinstance(heard, Output) and [delta.request_id for delta in heard.deltas] == ["b"]
    assert list(port.owner) == ["c"]


def test_a_client_that_reads_slowly_gets_fewer_and_larger_deltas(port: Port, context: zmq.Context[Any]) -> None:
    slow, quick = Client(context, port.address, "slow", room=4), Client(context, port.address, "quick")
    port.hello()
    slow.send(submit("a"))
    slow.send(submit("a2"))
    quick.send(submit("b"))
    received(port, 3)
    steps, mine = 20_000, 0
    for step in range(steps):
        finish = FinishReason.STOP if step == steps - 1 else None
        deltas = [Delta(id, step, [step], finish) for id in ("a", "a2")]
        port.send(Output([*deltas, Delta("b", step, [step], finish)], EngineStats(step=step + 1, running=3)))
        while not quick.socket.poll(100):  # where its queue was full for a moment
            port.receive(0)
        heard = quick.hears()  # the slow one is in nobody's way
        assert isinstance(heard, Output)
        mine += sum(len(delta.tokens) for delta in heard.deltas)
        assert sum(map(len, port.waiting.values())) <= 2  # however many steps
    port.send(Recovery(1, [0], "step", "lost"))  # what comes after them stays after them
    got: dict[str, list[int]] = {"a": [], "a2": []}
    messages = 0
    while True:
        port.receive(0)
        heard = slow.hears()
        if isinstance(heard, Recovery):
            break
        assert isinstance(heard, Output)
        messages += 1
        for delta in heard.deltas:
            assert delta.index == len(got[delta.request_id])
            got[delta.request_id] += delta.tokens
        last = heard
    assert mine == steps and got == {"a": list(range(steps)), "a2": list(range(steps))}
    assert messages < steps / 2 and last.stats.step == steps and last.deltas[0].finish is FinishReason.STOP
    assert not port.waiting


async def test_a_front_end_that_does_not_get_to_reading_holds_a_few_messages(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it has no room for waits with the engine, which makes one message of it."""
    monkeypatch.setattr("planaria.engine_port.LAST_WORDS", 0.0)
    connection = EngineConnection(lambda message: None)
    connection.connect(port.address)
    try:
        assert connection._listener is not None
        connection._listener.cancel()
        connection.send(submit("a"))
        await asyncio.to_thread(port.hello)
        await asyncio.to_thread(received, port, 1)
        step, tokens = 0, [7] * 50_000
        # It waits when there is no room, and is still there after tries, milliseconds apart, to send it.
        while not all(port.waiting and port.receive(5) == [] for _ in range(100)):
            assert step < 1000
            port.send(Output([Delta("a", step * len(tokens), tokens)], EngineStats(step=step)))
            step += 1
    finally:
        connection.close()


class Clock:
    """A second goes by in each sleep, in which `meanwhile` is called."""

    def __init__(self, meanwhile: Any) -> None:
        self.monotonic, self.meanwhile = itertools.count().__next__, meanwhile

    def sleep(self, seconds: float) -> None:
        self.meanwhile()


def test_last_words_wait_for_who_reads_late(
    port: Port, context: zmq.Context[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind more than there is room for, of a server that does nothing for a while."""
    client = Client(context, port.address, "late", room=4)
    port.hello()
    tokens, step = [7] * 50_000, 0
    client.send(submit("a"))
    received(port, 1)
    while not port.waiting:
        port.send(Output([Delta("a", step * len(tokens), tokens)], EngineStats(step=step)))
        step += 1
    port.send(Dead("crash", "why"))
    heard: list[FromEngine] = []
    slept = itertools.count(1)

    def meanwhile() -> None:
        if next(slept) > 3:
            while client.socket.poll(20):
                heard.append(client.hears())

    monkeypatch.setattr("planaria.engine_port.time", Clock(meanwhile))
    port.close()
    while not heard or heard[-1] != Dead("crash", "why"):
        heard.append(client.hears())


async def test_an_engine_that_has_ended_is_heard_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes to read what it said before its last words."""
    monkeypatch.setattr("planaria.server.engine_client.LAST_WORDS", 0.02)
    monkeypatch.setattr("planaria.server.engine_client.SLICE", 0.0)
    port = Port(f"ipc://{tmp_path}/engine")
    connection = EngineConnection(lambda message: time.sleep(0.01))
    connection.connect(port.address)
    try:
        await asyncio.to_thread(port.hello)
        for step in range(20):
            port.send(output(step))
        port.send(Dead("crash", "why"))
        await connection.last_words()
        assert connection._said.done() and connection._said.result().message == "why"
    finally:
        connection.close()
        port.close()
