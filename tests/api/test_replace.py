"""What a server and the process that takes its place say to each other, and what neither may be brought to do."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from planaria.errors import ConfigError
from planaria.hosts.memory import KVMemory
from planaria.hosts.weights import WeightsMemory
from planaria.node import readable
from planaria.server import handing_over, taking_over
from planaria.server.config import ServerConfig
from planaria.server.handing_over import HandingOver
from planaria.server.packets import LONGEST, Packets
from planaria.server.replace_messages import PROTOCOL, Ask, Declined, Offer, Take, ToFirst, ToSuccessor
from planaria.server.root_messages import Serving, Stop
from planaria.server.taking_over import TakingOver, call


class End:
    """Of a connection: what it heard. A descriptor that came is closed with it."""

    def __init__(self, sock: socket.socket, kind: Any) -> None:
        self.heard: list[Any] = []
        self.fds: list[int] = []
        self.news, self.gone = asyncio.Event(), asyncio.Event()
        self.packets: Packets[Any] = Packets(sock, msgspec.msgpack.Decoder(kind), self._hear, self.gone.set)

    def _hear(self, message: Any, fds: list[int]) -> None:
        self.heard.append(message)
        self.fds += fds
        self.news.set()

    async def until(self, count: int) -> list[Any]:
        async with asyncio.timeout(30):
            while len(self.heard) < count:
                self.news.clear()
                await self.news.wait()
        return self.heard

    async def over(self) -> None:
        """Until the other end has hung up."""
        async with asyncio.timeout(30):
            await self.gone.wait()

    def close(self) -> None:
        self.packets.close()
        for fd in self.fds:
            os.close(fd)


async def test_packets_wait_for_who_reads_slowly_and_carry_descriptors(tmp_path: Any) -> None:
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sender = End(one, ToFirst)
    with open(tmp_path / "file", "wb") as file:
        for number in range(500):  # more than a socket holds
            sender.packets.send(Declined("x" * 4000), [file.fileno()] if number == 499 else [])
        with pytest.raises(ValueError, match="a packet of"):
            sender.packets.send(Declined("x" * LONGEST))
        reader = End(other, ToSuccessor)
        assert len(await reader.until(500)) == 500 and len(reader.fds) == 1
        assert os.fstat(reader.fds[0]).st_ino == os.fstat(file.fileno()).st_ino
    one.send(b"no message")
    async with asyncio.timeout(30):
        await reader.gone.wait()
        await sender.gone.wait()
    sender.packets.send(Declined("nobody hears it"))
    sender.close()
    reader.close()


class Pieces:
    """The parts of a server that are looked at before anything is handed over."""

    def __init__(self) -> None:
        self.engine = SimpleNamespace(state="ready")
        self.sock = socket.create_server(("127.0.0.1", 0))
        self.keepers: Any = SimpleNamespace(keeping=[], pipes=[])
        fleet: Any = SimpleNamespace(
            local=object(), weights=None, config=SimpleNamespace(served_model_name="m", weights_number=0),
            shared_weights=None, began="", keepers=self.keepers,
            resizer=SimpleNamespace(busy=False), members={0: SimpleNamespace(engine=self.engine, memory=None)},
        )  # fmt: skip
        self.ended: list[int] = []
        life: Any = SimpleNamespace(
            service=SimpleNamespace(draining=""), server=SimpleNamespace(sock=self.sock), on_signal=self.ended.append
        )
        self.fleet, self.handing = fleet, HandingOver(fleet, life)
        self.handing.open()

    async def come(self) -> End:
        return End(await call(os.getpid(), self.handing.mailbox), ToSuccessor)


@pytest.fixture
async def pieces(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pieces]:
    monkeypatch.setattr(handing_over, "set_title", lambda role, **facts: None)
    made = Pieces()
    yield made
    made.handing.close()
    made.sock.close()


async def test_who_asks_is_told_why_not(pieces: Pieces) -> None:
    def asked(number: int, why: str) -> None:
        assert [type(message) for message in ends[number].heard] == [Declined] and why in ends[number].heard[0].why

    ends = [await pieces.come()]
    ends[0].packets.send(Ask(PROTOCOL + 1, "9.9"))
    await ends[0].over()
    asked(0, "release 9.9")
    pieces.engine.state = "loading"
    ends.append(await pieces.come())
    ends[1].packets.send(Ask(PROTOCOL, "1"))
    await ends[1].over()
    asked(1, "engine 0 is loading")
    pieces.engine.state = "ready"
    ends.append(await pieces.come())
    ends[2].packets.send(Ask(PROTOCOL, "1"))
    (offer,) = await ends[2].until(1)
    assert isinstance(offer, Offer) and (offer.weights, offer.engines) == (False, [])
    given = socket.socket(fileno=ends[2].fds.pop())
    assert given.getsockname() == pieces.sock.getsockname()
    given.close()
    ends.append(await pieces.come())
    await ends[3].over()
    asked(3, f"process {os.getpid()} takes its place already")
    assert pieces.handing.state == "asked"
    for end in ends:
        end.close()


async def test_keepers_of_devices_go_with_the_memory_that_they_have(pieces: Pieces) -> None:
    ends, weights, kv = os.pipe(), WeightsMemory.make(), KVMemory.make(1)
    assert weights is not None and kv is not None
    pieces.keepers.keeping, pieces.keepers.pipes = [(3, "address")], [ends[1]]
    pieces.fleet.weights, pieces.fleet.members[0].memory = weights, kv
    end = await pieces.come()
    end.packets.send(Ask(PROTOCOL, "1"))
    (offer,) = await end.until(1)
    taking: Any = object.__new__(TakingOver)
    taking.kv, taking.keepers = {}, None
    taking._offered(offer, end.fds)
    os.close(ends[1])
    assert taking.keepers.keeping == [(3, "address")] and not end.fds and not readable(ends[0], 0)
    for memory, own in ((taking.weights, weights), (taking.kv[0], kv)):
        assert memory.keepers.addresses == ((3, "address"),) and memory.origin.inode == own.origin.inode
    taking.keepers.close()
    assert readable(ends[0], 30), "who keeps it hears that nobody is there any more"
    os.close(ends[0])
    taking.sock.close()
    end.close()


async def test_words_out_of_turn_do_nothing(pieces: Pieces) -> None:
    end = await pieces.come()
    for message in (Serving(), Stop(), Ask(PROTOCOL, "1")):
        end.packets.send(message)
    await end.until(1)
    assert pieces.handing.state == "asked" and not pieces.ended
    end.close()
    async with asyncio.timeout(30):
        while pieces.handing.state != "serves":
            await asyncio.sleep(0)


async def test_a_server_that_is_not_there_and_one_that_does_not_answer(
    pieces: Pieces, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = ServerConfig(port=pieces.sock.getsockname()[1], replace=True)
    with caplog.at_level("INFO", "planaria.server"):
        assert await TakingOver.ask(config) is None
    assert f"no server of yours runs on port {config.port}" in caplog.text
    monkeypatch.setattr(taking_over, "runs_on", lambda config: (os.getpid(), pieces.handing.mailbox))
    found = await TakingOver.ask(config)
    assert found is not None and found.sock.getsockname() == pieces.sock.getsockname()
    monkeypatch.setattr(taking_over, "MARGIN", 0.1)
    found.packets.send(Take())  # never answered: what it needs is not there
    pieces.handing.close()
    with pytest.raises(ConfigError, match="it did not give up its engines"):
        await found.take()
    monkeypatch.setattr(taking_over, "runs_on", lambda config: (os.getpid(), -1))
    with pytest.raises(ConfigError, match="takes no calls"):
        await TakingOver.ask(config)
    with pytest.raises(OSError, match="no calls are taken there"):
        await call(os.getpid(), pieces.sock.fileno())
    found.sock.close()
    found.close()
