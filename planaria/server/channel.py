"""Typed messages over a connected stream socket between a root process and an API process: each as msgpack behind its
length. A socket pair that the child inherits: it has no name, and its end is the end of the other process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Generic, TypeVar

import msgspec

T = TypeVar("T")

LENGTH = 4  # bytes
LIMIT = 64 << 20  # bytes of a message


class Channel(Generic[T]):
    """One end. T: what the other end says."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, decoder: msgspec.msgpack.Decoder[T]):
        self._reader, self._writer, self._decoder = reader, writer, decoder
        self._encoder = msgspec.msgpack.Encoder()

    @classmethod
    async def open(cls, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> Channel[T]:
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer, decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Never waits; to an end that is closed nothing is sent."""
        if not self._writer.is_closing():
            payload = self._encoder.encode(message)
            self._writer.write(len(payload).to_bytes(LENGTH, "little") + payload)

    async def receive(self) -> T | None:
        """The next message; None: the other end is closed."""
        try:
            length = int.from_bytes(await self._reader.readexactly(LENGTH), "little")
            if length > LIMIT:
                raise ValueError(f"a message of {length} bytes")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    async def close(self) -> None:
        """What was sent still arrives."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()
