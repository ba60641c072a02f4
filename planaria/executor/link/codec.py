"""Commands and replies as bytes, for links that leave the process.

Typed msgpack, one message to one value of `planaria.protocol`. Nothing here runs code that a message names: bytes that
aren't exactly a command (or a reply) raise CodecError and have no other effect.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.errors import PlanariaError
from planaria.protocol import Command, Failed, Reply

MAX_MESSAGE = 1 << 32  # bytes

Bytes = bytes | bytearray | memoryview

_encoder = msgspec.msgpack.Encoder()
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

# What msgspec raises for bytes that aren't a message: malformed or of the wrong type (DecodeError covers both), text
# that isn't UTF-8, nesting deeper than the interpreter's stack allows.
_BAD_BYTES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError, OverflowError, ValueError)
_BAD_VALUE = (msgspec.MsgspecError, TypeError, UnicodeEncodeError, RecursionError, OverflowError, ValueError)


class CodecError(PlanariaError):
    """A value that can't be sent, or bytes that aren't a message. One line."""


def encode_command(command: Command) -> bytes:
    """Raises CodecError for arguments that aren't plain data (numbers, text, bytes, lists, dicts, structs)."""
    return _encode(command)


def encode_reply(reply: Reply) -> bytes:
    """As `encode_command`."""
    return _encode(reply)


def decode_command(data: Bytes) -> Command:
    """Raises CodecError. Nothing of the result refers to `data`."""
    try:
        return _commands.decode(data)
    except _BAD_BYTES as e:
        raise CodecError(f"not a command: {_said(e)}") from None


def decode_reply(data: Bytes) -> Reply:
    """Raises CodecError. Nothing of the result refers to `data`."""
    try:
        return _replies.decode(data)
    except _BAD_BYTES as e:
        raise CodecError(f"not a reply: {_said(e)}") from None


def answer(rank: int, reply: Reply) -> bytes:
    """A rank's reply as bytes. One that can't be sent becomes a `Failed`, so that the command is answered anyway."""
    try:
        return _encode(reply)
    except CodecError as e:
        if isinstance(reply, Failed):  # text that UTF-8 can't hold, such as a file name with stray bytes
            text = [_plain(part) for part in (reply.phase, reply.message, reply.traceback, reply.kind)]
            return _encode(Failed(reply.rank, *text))
        return _encode(Failed(rank, "reply", f"the answer can't be sent: {e}", ""))


def heard(data: Bytes, rank: int) -> Reply:
    """The reply that `rank` sent; a `Failed` in its place where the bytes aren't one."""
    try:
        return decode_reply(data)
    except CodecError as e:
        return Failed(rank, "reply", f"the driver can't read what rank {rank} answered: {e}", "")


def _encode(value: Any) -> bytes:
    try:
        return _encoder.encode(value)
    except _BAD_VALUE as e:
        raise CodecError(f"{type(value).__name__} can't be sent to another process: {_said(e)}") from None


def _plain(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _said(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
