"""What is kept of a response: records as bytes, numbers of events. (`tests/sim/restarts.py`: it outlives servers.)"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from planaria.server.kept import Kept
from planaria.server.records import Again, ConversationItem, Head, Outcome, PieceRecord, Record, Whole, frame, scan
from planaria.server.response_shapes import event_bytes, num_events
from planaria.types import SamplingParams
from planaria.wire import Submit


def head(number: int, background: bool = True) -> Head:
    id = f"resp_{number:032x}"
    submit = Submit(id, [1, 2, 3], SamplingParams(temperature=0.5), seed=number, max_tokens=9)
    items = [ConversationItem("i", "user", ["x"])]
    return Head(id, "", 2**40, background, "m", "m", {"metadata": {"é": "日本"}}, items, submit)


texts = st.text(max_size=4)
outcomes = st.builds(Outcome, st.sampled_from(["completed", "incomplete", "cancelled", "failed"]), st.integers(0, 9))
records = st.lists(
    st.one_of(
        st.builds(PieceRecord, st.lists(st.integers(0, 2**31 - 1), max_size=3), texts, st.none() | outcomes),
        st.just(Again()), st.builds(Whole, st.lists(st.integers(0, 9), max_size=3), texts, outcomes),
    ), max_size=4,
).map(lambda more: [head(1), *more])  # fmt: skip


@given(records)
def test_what_is_torn_off_anywhere_is_no_record(given: list[Record]) -> None:
    parts = [frame(record) for record in given]
    data, ends = b"".join(parts), [0]
    for part in parts:
        ends.append(ends[-1] + len(part))
    assert scan(data) == (given, len(data))
    near = {end + by for end in ends for by in (-1, 0, 1)} & set(range(len(data)))
    for cut in near | set(range(0, len(data), 1 + len(data) // 200)):
        whole = max(i for i, end in enumerate(ends) if end <= cut)
        assert scan(data[:cut]) == (given[:whole], ends[whole])


@given(records, st.integers(1, 255))
def test_a_wrong_byte_ends_what_can_be_read(given: list[Record], flip: int) -> None:
    parts = [frame(record) for record in given]
    data = b"".join(parts)
    before = 0
    for number, part in enumerate(parts):
        for at in range(before, before + len(part)):
            wrong = data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :]
            assert scan(wrong) == (given[:number], before)
        before += len(part)


@given(st.lists(st.tuples(texts, st.integers(0, 3)), max_size=6), outcomes, st.booleans(), st.data())
def test_events_are_numbered_by_the_records_alone(
    pieces: list[tuple[str, int]], outcome: Outcome, background: bool, data: st.DataObject
) -> None:
    one = Kept(head(1, background))
    written = frame(one.head)
    for text, tokens in pieces:
        written += one.add(PieceRecord(list(range(tokens)), text))
    half = written + one.file()[:0]
    written += one.add(PieceRecord([], "", outcome))
    for count in range(one.count + 1):  # told by and by, and never otherwise
        known = [event_bytes(one, n) for n in range(num_events(one))]
        one.written(count)
        assert [event_bytes(one, n) for n in range(len(known))] == known
    events = [event_bytes(one, n) for n in range(num_events(one))]
    for bytes_ in (written, one.file()):  # read again, also from the file that is as short as can be
        again = Kept.of(scan(bytes_)[0])
        assert again is not None and again.over
        assert [event_bytes(again, n) for n in range(num_events(again))] == events
    unfinished = Kept.of(scan(half)[0])
    assert unfinished is not None and unfinished.end is None and unfinished.told == len(pieces)
    assert Kept.of(scan(unfinished.file())[0]).tokens == [list(range(tokens)) for _, tokens in pieces]  # type: ignore[union-attr]
    cut = data.draw(st.integers(0, num_events(unfinished)))
    first = [event_bytes(unfinished, n) for n in range(cut)]
    assert first == events[:cut]


def test_records_that_make_no_response() -> None:
    told, whole = PieceRecord([1], "x"), Whole([], "", Outcome("completed", 1))
    done = PieceRecord([1], "", Outcome("completed", 1))
    for wrong in ([], [told], [head(1), head(1)], [head(1), done, told], [head(1), told, whole]):
        assert Kept.of(wrong) is None
    short = Kept(head(1))
    short.add(done)
    (only, _), _ = scan(short.file())
    assert isinstance(only, Head) and only.submit is None and Kept.of([only]) is None
