"""Every decoder of bytes from another process: what goes in comes out, any other bytes are one clear error."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.errors import PlanariaError
from planaria.executor import node_messages as nodes
from planaria.executor.boot import RankBoot
from planaria.executor.link import circle
from planaria.executor.link.address import TcpAddress
from planaria.executor.link.codec import CodecError, answer, decode_command, encode_command, heard
from planaria.executor.link.keys import Invitation, Pair
from planaria.hosts.host import Place, Program
from planaria.protocol import Failed, Fresh, Hello, Join, Regroup, Row, StepPlan
from planaria.topology import Layout
from planaria.types import SamplingParams

small = st.integers(0, 2**31)
text = st.text(max_size=20)
digests = st.dictionaries(text, text, max_size=3)
layouts = st.builds(Layout, *[st.integers(1, 1 << 20)] * 4)
places = st.builds(
    Place, small, text, text, text, small, small, st.lists(small, max_size=2).map(tuple)
)  # fmt: skip
hellos = st.builds(
    Hello, small, small, text, text, text, digests, digests,
    st.dictionaries(st.sampled_from(["tp", "pp"]), st.tuples(small, small), max_size=2),
    st.none() | st.tuples(text, small), small,
)  # fmt: skip
invitations = st.builds(
    Invitation, text, text, st.builds(Pair, text, text), small, small, small
)  # fmt: skip


@given(st.builds(Join, small, layouts, st.booleans()))
def test_join(join: Join) -> None:
    assert decode_command(encode_command(join)) == join


@given(hellos)
def test_hello(hello: Hello) -> None:
    assert heard(answer(0, hello), 0) == hello


@given(st.builds(Regroup, small, layouts, st.lists(hellos, max_size=3).map(tuple)))
def test_regroup(regroup: Regroup) -> None:
    assert decode_command(encode_command(regroup)) == regroup


@given(invitations)
def test_invitation(invitation: Invitation) -> None:
    assert Invitation.decode(invitation.encode()) == invitation


def test_agents_messages() -> None:
    for said in (
        nodes.Here(1, "node", "10.0.0.1", 7, {"a": "b"}, (3, 1), "home", 8), nodes.ChildNews(3, 7, "up", "how", -9),
        nodes.AllEnded(), nodes.Trouble("why"), nodes.Leaves(),
    ):  # fmt: skip
        assert nodes.decode(nodes.encode_from_agent(0, said), 0) == said
    for told in (
        nodes.Welcome(), nodes.Spawn(1, 2, Program("module", ("a",), (3,)), b"boot"), nodes.Tell(1, b"boot"),
        nodes.Spawn(1, 2, Program("module"), None), nodes.KillChild(1), nodes.EndAll(True), nodes.NodeRefused("why"),
    ):  # fmt: skip
        assert nodes.decode_to_agent(nodes.encode(told)) == told


def _reply(data: bytes) -> Any:
    value = heard(data, 0)
    if isinstance(value, Failed) and "can't read" in value.message:
        raise CodecError(value.message)
    return value


def _agent_said(data: bytes) -> Any:
    value = nodes.decode(data, 1)
    if isinstance(value, nodes.Trouble) and "can't be read" in value.message:
        raise CodecError(value.message)
    return value


def _agent_told(data: bytes) -> Any:
    value = nodes.decode_to_agent(data)
    if isinstance(value, CodecError):
        raise value
    return value


def _round(data: bytes) -> Any:
    value = circle.decode(data)
    if isinstance(value, CodecError):
        raise value
    return value


DECODERS: dict[str, Callable[[bytes], Any]] = {
    "command": decode_command, "reply": _reply, "invitation": Invitation.decode, "boot": RankBoot.decode,
    "agent said": _agent_said, "agent told": _agent_told, "round": _round,
}  # fmt: skip


class Bomb:
    def __reduce__(self) -> tuple[object, ...]:
        return pytest.fail, ("something unpickled",)


NASTY = [
    b"", b"\xc1", b"\x80", b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
    b"\x91" * 100_000, b"\x81\xa1a" * 100_000, b"\x97" + b"\x91" * 100_000, b"\x96" + b"\x81\xa1a" * 100_000,
    b"\xc7\x0c\xff" + b"\xff" * 12,
    b"\xd9\x02\xff\xff", b"\x96\xd9\x02\xff\xff", b"\xcf" + b"\xff" * 8, *[pickle.dumps(Bomb(), p) for p in range(6)],
]  # fmt: skip


def check(name: str, data: bytes) -> None:
    try:
        value = DECODERS[name](data)
    except PlanariaError as e:
        assert "\n" not in str(e) and len(str(e)) < 500
    else:
        assert type(value).__module__.startswith("planaria.")


@pytest.mark.parametrize("data", NASTY, ids=lambda data: data[:8].hex() or "empty")
@pytest.mark.parametrize("name", DECODERS)
def test_bytes_that_are_no_message(name: str, data: bytes) -> None:
    with pytest.raises(PlanariaError):
        DECODERS[name](data)


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.binary(max_size=200))
def test_any_bytes(name: str, data: bytes) -> None:
    check(name, data)


def boot() -> bytes:
    """A boot with everything but a configuration, which only makes it longer."""
    link = TcpAddress(Invitation("tcp://10.0.0.1:1", "key", Pair("public", "secret"), 1, 0, 1).encode())
    return msgspec.msgpack.encode([{}, Place(1, "home", "node", "10.0.0.1", 5), link, 1, 1, False])


GOOD: dict[str, list[bytes]] = {
    "command": [encode_command(Regroup(1, Layout(tp=2), (Hello(0, 1, "home", "node", "10.0.0.1"),)))],
    "reply": [answer(0, Hello(0, 1, "home", "node", "10.0.0.1", {"a": "b"}, {}, {"tp": (1, 2)}, ("10.0.0.1", 1)))],
    "invitation": [Invitation("tcp://10.0.0.1:1", "key", Pair("public", "secret"), 1, 0, 1).encode()],
    "boot": [boot()],
    "agent said": [nodes.encode_from_agent(0, nodes.ChildNews(1, 2, "said", "ended", 3))],
    "agent told": [nodes.encode(nodes.Spawn(1, 2, Program("module"), b"boot"))],
    "round": [circle.encode(circle.Round(1.5, (circle.CirclePart("step 1", b"hash", b"reply"),)))],
}


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_damaged_messages(name: str, data: st.DataObject) -> None:
    good = bytearray(data.draw(st.sampled_from(GOOD[name])))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(good) - 1))
        match data.draw(st.sampled_from("xcd")):
            case "x":
                good[at] = data.draw(st.integers(0, 255))
            case "c":
                del good[at + 1 :]
            case "d":
                good[at:at] = good[: at + 1]
    check(name, bytes(good))


@pytest.mark.row("X4")
def test_a_steady_step_is_said_in_sixteen_bytes() -> None:
    """Rows that go on by themselves aren't named, so there is nothing to leave out for later stages; a prompt is said
    once."""
    steady = StepPlan(epoch=3, step=1000, lanes=((),), freed_rows=((),))
    assert len(encode_command(steady)) <= 16
    for count, most, without in ((128, 440, 48), (1024, 3200, 112), (8192, 26_000, 1200)):
        for tokens, limit in (([49151] * count, most), (list[int](), without)):
            row = Row(0, 0, count, tuple(range(count // 16)), True, Fresh(tokens, count, SamplingParams(), seed=2**31))
            assert len(encode_command(msgspec.structs.replace(steady, lanes=((row,),)))) < limit
