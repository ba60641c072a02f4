"""Commands and replies as bytes, for links that leave the process.

Typed msgpack, one message to one value of `planaria.protocol`. Nothing here runs code that a message names: bytes that
aren't exactly a command (or a reply) raise CodecError and have no other effect.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

from planaria.errors import PlanariaError
from planaria.protocol import Command, Failed, Reply

MAX_MESSAGE = 1 << 32  # bytes

Bytes = bytes | bytearray | memoryview


def _pack(value: Any) -> bytes:
    """For the encoder: what msgpack has no type for."""
    if type(value) is array and value.typecode == "i":
        return value.tobytes()  # little-endian, as every machine that runs this is
    raise TypeError(f"no message can hold a {type(value).__name__}")


def _unpack(kind: type, value: Any) -> Any:
    """For the decoders: the inverse."""
    if kind is array:
        return array("i", value)
    raise TypeError(f"no message holds a {kind.__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_pack)
_commands: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command, dec_hook=_unpack)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply, dec_hook=_unpack)

# The bare functions, for where microseconds count: they raise what is in BAD_BYTES.
read_command, read_reply = _commands.decode, _replies.decode

# What msgspec raises for bytes that aren't a message: malformed or of the wrong type (DecodeError covers both), text
# that isn't UTF-8, nesting deeper than the interpreter's stack allows.
BAD_BYTES = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, MemoryError, OverflowError, ValueError)
_BAD_VALUE = (msgspec.MsgspecError, TypeError, UnicodeEncodeError, RecursionError, OverflowError, ValueError)


class CodecError(PlanariaError):
    """A value that can't be sent, or bytes that aren't a message. One line."""


def encode_command(command: Command) -> bytes:
    """Raises CodecError for arguments that aren't plain data (numbers, text, bytes, lists, dicts, structs)."""
    try:
        return _encoder.encode(command)
    except _BAD_VALUE as e:
        raise _unsendable(command, e) from None


def decode_command(data: Bytes) -> Command:
    """Raises CodecError. Nothing of the result refers to `data`."""
    try:
        return read_command(data)
    except BAD_BYTES as e:
        raise unreadable_command(e) from None


def answer(rank: int, reply: Reply) -> bytes:
    """A rank's reply as bytes. One that can't be sent becomes a `Failed`, so that the command is answered anyway."""
    try:
        return _encoder.encode(reply)
    except _BAD_VALUE as e:
        if isinstance(reply, Failed):  # text that UTF-8 can't hold, such as a file name with stray bytes
            text = [_plain(part) for part in (reply.phase, reply.message, reply.traceback, reply.kind)]
            return _encoder.encode(Failed(reply.rank, *text))
        return _encoder.encode(Failed(rank, "reply", _plain(f"the answer can't be sent: {said(e)}"), ""))


def heard(data: Bytes, rank: int) -> Reply:
    """The reply that `rank` sent; a `Failed` in its place where the bytes aren't one."""
    try:
        return read_reply(data)
    except BAD_BYTES as e:
        return unreadable_reply(e, rank)


def unreadable_reply(error: BaseException, rank: int) -> Failed:
    return Failed(rank, "reply", f"the driver can't read what rank {rank} answered: {said(error)}", "")


def unreadable_command(error: BaseException) -> CodecError:
    return CodecError(f"not a command: {said(error)}")


def _unsendable(value: Any, error: BaseException) -> CodecError:
    return CodecError(f"{type(value).__name__} can't be sent to another process: {said(error)}")


def _plain(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def said(error: BaseException) -> str:
    """What an error says, in one line of bounded length."""
    return " ".join(str(error).split())[:300] or type(error).__name__
