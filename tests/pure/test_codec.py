"""Commands and replies as bytes: what goes in comes out, and no bytes do anything but that."""

from __future__ import annotations

import math
import pickle
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.executor.link.codec import (
    CodecError,
    answer,
    decode_command,
    encode_command,
    heard,
)
from planaria.executor.link.faults import MessageLost
from planaria.executor.link.stream import FrameDropped, FrameStream, Kind
from planaria.protocol import (
    Allocate,
    Call,
    Command,
    Done,
    Exit,
    Facts,
    Failed,
    Fresh,
    LaneResult,
    Load,
    PlaceExperts,
    Probe,
    Ready,
    Reply,
    Row,
    SendExperts,
    StepPlan,
    StepResult,
)
from planaria.topology.experts import Move
from planaria.types import SamplingParams, TokenLogprobs

small = st.integers(0, 2**31)
text = st.text(max_size=20)
number = st.floats(allow_nan=False)
plain: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | number | text | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=10,
)
params = st.builds(
    SamplingParams, temperature=st.floats(0, 2), top_p=st.floats(0.1, 1), seed=st.none() | small,
    logit_bias=st.none() | st.dictionaries(small, st.floats(-100, 100), max_size=3), stop=st.lists(text).map(tuple),
)  # fmt: skip
fresh = st.builds(
    Fresh, tokens=st.lists(st.integers(0, 2**31 - 1), max_size=300).map(lambda ids: array("i", ids)),
    num_prompt=small, params=params, seed=st.integers(-(2**63), 2**63 - 1),
    eos_ids=st.lists(small, max_size=2).map(tuple),
)  # fmt: skip
row = st.builds(
    Row, row=small, start=small, count=small, blocks=st.lists(small, max_size=5).map(tuple), sample=st.booleans(),
    fresh=st.none() | fresh,
)  # fmt: skip
slots = st.lists(small, max_size=4).map(tuple)
maps = st.lists(slots, max_size=2).map(tuple)
moves = st.lists(st.builds(Move, small, small, small, st.none() | small, small), max_size=3).map(tuple)
commands: st.SearchStrategy[Command] = (
    st.builds(Load, st.lists(small, max_size=3).map(tuple), maps, moves)
    | st.builds(SendExperts, small, moves, st.booleans())
    | st.builds(PlaceExperts, small, st.lists(st.tuples(small, slots), max_size=2).map(tuple))
    | st.just(Probe())
    | st.just(Exit())
    | st.builds(Allocate, small)
    | st.builds(Call, text, st.lists(plain, max_size=3).map(tuple), st.dictionaries(text, plain, max_size=2))
    | st.builds(
        StepPlan, small, small, st.lists(st.lists(row, max_size=4).map(tuple), max_size=3).map(tuple),
        st.lists(st.lists(small, max_size=3).map(tuple), max_size=3).map(tuple),
    )
)  # fmt: skip
logprobs = st.builds(
    TokenLogprobs, small, number, small, st.lists(st.tuples(small, number), max_size=3).map(tuple)
)  # fmt: skip
replies: st.SearchStrategy[Reply] = (
    st.builds(Ready, small, st.dictionaries(text, number, max_size=2), st.dictionaries(text, plain, max_size=2))
    | st.builds(Facts, small, small, small, small)
    | st.builds(Done, small, plain)
    | st.builds(Failed, small, text, text, text, text)
    | st.builds(
        StepResult, small, small,
        st.lists(
            st.builds(
                LaneResult, st.lists(small, max_size=4), st.lists(small, max_size=4),
                st.dictionaries(small, st.lists(logprobs, max_size=2), max_size=2),
                st.dictionaries(small, st.lists(logprobs, max_size=2), max_size=2),
                st.dictionaries(small, text, max_size=2), st.dictionaries(small, st.lists(small, max_size=3)),
            ), max_size=2,
        ).map(tuple), number, small,
    )
)  # fmt: skip


@given(commands)
def test_commands_come_out_as_they_went_in(command: Command) -> None:
    assert decode_command(encode_command(command)) == command


@given(replies)
def test_replies_come_out_as_they_went_in(reply: Reply) -> None:
    assert heard(answer(3, reply), 3) == reply


def _reads(data: bytes) -> None:
    try:
        value: Command | Reply = decode_command(data)
    except CodecError as e:
        assert str(e).startswith("not a ") and "\n" not in str(e) and len(str(e)) < 400
        value = heard(data, 1)
        assert not isinstance(value, Failed) or ("\n" not in value.message and len(value.message) < 400)
    assert type(value).__module__ == "planaria.protocol"


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_one_clear_error(data: bytes) -> None:
    _reads(data)


@given(commands | replies, st.data())
def test_damaged_messages(value: Any, data: st.DataObject) -> None:
    good = bytearray(encode_command(value))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        match data.draw(st.sampled_from("xcd")):
            case "x":
                good[at] = data.draw(st.integers(0, 255))
            case "c":
                del good[at + 1 :]
            case "d":
                good[at:at] = good[: at + 1]
    _reads(bytes(good))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # a list of 4 billion
        b"\x94\xa4call\xa1m\xdd\x7f\xff\xff\xff",
        b"\x94\xa4call\xa1m\x91\xdf\x0f\xff\xff\xff",
        b"\x94\xa4call\xa1m\x91\xc6\xff\xff\xff\xff",  # 4 GB of bytes announced
        b"\x94\xa4call\xa1m\x91" + b"\x91" * 100_000,  # nesting
        b"\x94\xa4call\xa1m\x91" + b"\x81\xa1a" * 100_000,
        b"\x94\xa4call\xa1m\x91\xd9\x02\xff\xff\x80",  # not UTF-8
        b"\x94\xa4call\xa1m\x91\xc7\x0c\xff" + b"\xff" * 12,  # a timestamp out of range
        b"\x92\xa6nobody\x01",
        answer(0, Done(0)) + b"\x00",
        pickle.dumps(Load()),
    ],
)
def test_bytes_that_are_no_command(data: bytes) -> None:
    with pytest.raises(CodecError, match="not a command"):
        decode_command(data)
    failed = heard(data, 4) if not data.startswith(b"\x93\xa4done") else None
    assert failed is None or (isinstance(failed, Failed) and failed.rank == 4 and failed.phase == "reply")


@pytest.mark.parametrize("value", [object(), 2**64, {1: {object()}}, lambda: 0, "\udcff", Call("m", (print,))])
def test_values_that_cant_be_sent(value: Any) -> None:
    with pytest.raises(CodecError, match="can't be sent to another process"):
        encode_command(Call("m", (value,)))
    failed = heard(answer(2, Done(2, value)), 2)
    assert isinstance(failed, Failed) and failed.rank == 2 and "can't be sent" in failed.message


def test_a_failure_is_told_whatever_its_text() -> None:
    failed = heard(answer(1, Failed(1, "load", "no file \udcff", "trace \udc80", "model")), 1)
    assert failed == Failed(1, "load", "no file \\udcff", "trace \\udc80", "model")


def test_numbers_that_json_lacks() -> None:
    value = heard(answer(0, Done(0, [math.inf, -math.inf])), 0)
    assert isinstance(value, Done) and value.value == [math.inf, -math.inf]


# -- the frames of the TCP link


def ends(**options: Any) -> tuple[FrameStream[bytes], FrameStream[bytes]]:
    options = {"chunk_bytes": 8, "window": 4, **options}
    return FrameStream(1, "b", bytes, **options), FrameStream(1, "a", bytes, **options)


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=20))
def test_streams_carry_messages_in_order_and_within_the_window(messages: list[bytes]) -> None:
    a, b = ends()
    got = []
    for i, message in enumerate(messages):
        for chunk, left in a.chunks(message):
            if a.full():
                assert b.owes_credit()
                a.take(b.header(Kind.CREDIT), b"")
            assert not a.full()
            found = b.take(a.data_header(i, left), chunk)[1]
            if found is not None:
                got.append(found)
    assert got == list(enumerate(messages))


@given(st.lists(st.integers(1, 20), min_size=2, max_size=12), st.data())
def test_streams_notice_what_is_missing_or_repeated(sizes: list[int], data: st.DataObject) -> None:
    a, b = ends(window=1000)
    frames = [(a.data_header(i, left), chunk) for i, size in enumerate(sizes) for chunk, left in a.chunks(bytes(size))]
    at = data.draw(st.integers(0, len(frames) - 2))
    for header, chunk in frames[:at]:
        b.take(header, chunk)
    if at:
        with pytest.raises(FrameDropped, match="replayed"):
            b.take(*frames[data.draw(st.integers(0, at - 1))])
    with pytest.raises((MessageLost, FrameDropped)):
        b.take(*frames[at + 1])
    for header, chunk in frames[at:]:  # neither has changed anything
        b.take(header, chunk)
    assert b.taken == len(frames)


@given(st.binary(max_size=60), st.binary(max_size=20))
def test_streams_refuse_any_other_bytes(header: bytes, payload: bytes) -> None:
    a, b = ends()
    with pytest.raises(FrameDropped):
        b.take(header, payload)
    damaged = bytearray(a.data_header(0, 3))
    damaged[: len(header)] = header[: len(damaged)]
    before = b.taken
    try:
        b.take(bytes(damaged), payload)
    except (FrameDropped, MessageLost):
        assert b.taken == before
