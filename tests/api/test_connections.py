"""Connections that do nothing, too many of them, and no descriptors: nobody waits for ever, others are answered."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import resource
import socket

import pytest

from planaria.processes import raise_descriptor_limit
from planaria.server import connections
from planaria.server.connections import Listener, connection_bound

GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
BODY = json.dumps({"prompt": [5, 6], "max_tokens": 3, "min_tokens": 3}).encode()


@contextlib.asynccontextmanager
async def connected(server):
    """A connection to it: its reader and writer."""
    reader, writer = await asyncio.open_connection(*server.sock.getsockname())
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def answer(reader) -> tuple[int, bytes]:
    """Status and body of the next answer."""
    async with asyncio.timeout(30):
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        return int(head.split()[1]), await reader.readexactly(length)


async def end(reader) -> bytes:
    """What still comes until it is closed."""
    async with asyncio.timeout(30):
        return await reader.read()


async def test_a_connection_that_says_nothing_is_closed(start):
    async with start(header_timeout=0.05) as server, connected(server) as (reader, _):
        assert await end(reader) == b""


@pytest.mark.parametrize("before", [b"", GET])
async def test_half_a_header_is_answered_in_time(start, before):
    """Bytes that drop in don't put the end off, on a new connection or behind an answer."""
    async with start(header_timeout=0.2) as server, connected(server) as (reader, writer):
        if before:
            writer.write(before)
            assert (await answer(reader))[0] == 200

        async def drip():
            for i in range(10_000):
                writer.write(b"GET /version HTTP/1.1\r\nX: " if not i else b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        status, body = await answer(reader)
        dripping.cancel()
        assert status == 408 and json.loads(body)["error"]["code"] == "request_timeout"


async def test_a_body_whose_answer_was_sent_is_not_waited_for(start):
    async with start(header_timeout=0.1, api_keys=("k",)) as server, connected(server) as (reader, writer):
        writer.write(POST % 1000)
        assert (await answer(reader))[0] == 401

        async def drip():
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.01)

        dripping = asyncio.create_task(drip())
        with contextlib.suppress(ConnectionError):
            assert await end(reader) == b""
        dripping.cancel()


async def test_an_idle_connection_is_closed_and_a_slow_answer_is_not(start):
    async with start(header_timeout=0.05, keep_alive_timeout=1) as server, connected(server) as (reader, writer):
        server.engine.gate.clear()
        writer.write(POST % len(BODY) + BODY)
        await server.engine.until(lambda: server.engine.submitted)
        await asyncio.sleep(0.2)  # longer than a header may take
        server.engine.gate.set()
        assert (await answer(reader))[0] == 200
        assert await end(reader) == b""


async def test_more_connections_than_there_may_be(start):
    """The one that waits longest goes; where all are at work the new one is told so, and each place is given again."""
    async with start(max_connections=3) as server, contextlib.AsyncExitStack() as stack:

        async def connection(asks: bytes):
            reader, writer = await stack.enter_async_context(connected(server))
            writer.write(asks)
            return reader, writer

        idle = [await connection(GET) for _ in range(3)]
        for reader, _ in idle:
            assert (await answer(reader))[0] == 200
        server.engine.gate.clear()
        busy = []
        for number in range(1, 4):
            busy.append(await connection(POST % len(BODY) + BODY))
            await server.engine.until(lambda: len(server.engine.submitted) == number)  # noqa: B023
            assert await end(idle[number - 1][0]) == b""  # closed, in the order of their last requests
        for _ in range(50):
            reader, _ = await connection(GET)
            status, body = await answer(reader)
            assert status == 503 and json.loads(body)["error"]["code"] == "too_many_connections"
            assert await end(reader) == b""
        server.engine.gate.set()
        for reader, _ in busy:
            assert (await answer(reader))[0] == 200
        reader, _ = await connection(GET)
        assert (await answer(reader))[0] == 200


async def test_no_descriptors_for_another_connection(server, monkeypatch, caplog):
    """Nothing is accepted for a while, one line says so, and who waited is served."""
    monkeypatch.setattr(connections, "ACCEPT_PAUSE", 3600.0)
    tried, none_left, paused = 0, True, []
    real, pause = socket.socket.accept, Listener._pause
    monkeypatch.setattr(Listener, "_pause", lambda self, until: (paused.append(self), pause(self, until)))

    def accept(sock):
        nonlocal tried
        tried += 1
        if none_left:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(sock)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with caplog.at_level(logging.WARNING):
        async with connected(server) as (reader, writer):
            writer.write(GET)
            async with asyncio.timeout(60):
                while not tried:
                    await asyncio.sleep(0)
            for _ in range(100):
                await asyncio.sleep(0)
            assert tried == 1, "in each turn of the event loop it was tried again"
            none_left = False
            paused[0]._resume()
            assert (await answer(reader))[0] == 200
    lines = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert lines == ["can't accept connections: Too many open files"]


async def test_bytes_that_are_no_http(server):
    async with connected(server) as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00\r\n\r\n")
        status, body = await answer(reader)
        assert status == 400 and json.loads(body)["error"]["code"] == "invalid_http"
        assert await end(reader) == b""


@pytest.mark.parametrize("in_two", [False, True])
async def test_a_body_in_crumbs_is_not_taken_apart(server, in_two):
    """Each chunk costs many times what it holds."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with connected(server) as (reader, writer):
        writer.write(head)
        if in_two:
            await writer.drain()
            await asyncio.sleep(0.05)
        with contextlib.suppress(ConnectionError):
            writer.write(b"1\r\n \r\n" * 100_000)
            status, body = await answer(reader)
            assert status == 400 and "chunks are too small" in json.loads(body)["error"]["message"]


async def test_a_chunked_body_of_ordinary_chunks(server):
    async def parts():
        for i in range(0, len(BODY), 7):
            yield BODY[i : i + 7]

    async with server.http() as http:
        assert (await http.post("/v1/completions", content=parts())).status_code == 200


async def test_a_damaged_chunk_in_the_midst_of_an_answer(server, caplog):
    """The answer has begun, so that nothing but its end can be said: no traceback, and others go on."""
    server.engine.gate.clear()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with connected(server) as (reader, writer):
        writer.write(head + b"%x\r\n%b\r\n" % (len(BODY), BODY) + b"zz\r\n")
        await end(reader)
    server.engine.gate.set()
    async with server.http() as http:
        assert (await http.get("/version")).status_code == 200
    assert not [r for r in caplog.records if r.exc_info]


def test_descriptors_are_left_for_all_else(monkeypatch):
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.insert(0, new))
    assert connection_bound(4096) == 1024 - connections.RESERVE - connections.TURNED_AWAY and connection_bound(10) == 10
    raise_descriptor_limit()
    assert limits[0] == (4096, 4096) and 3500 < connection_bound(4096) < 4096
    limits.insert(0, (100, 100))
    assert 1 <= connection_bound(4096) <= 50
    limits.insert(0, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert connection_bound(4096) == 4096
