"""Which weights drew a token: whatever is joined, held, cut or read again on its way, each token says the same."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from planaria.engine_port import _Steps
from planaria.server.common import versions_of
from planaria.server.kept import Kept
from planaria.server.records import Outcome, PieceRecord, frame, scan, version_runs
from planaria.server.response_shapes import event_bytes, num_events, response_of
from planaria.server.stream import Piece, Stream
from planaria.server.wishes import EngineWishes
from planaria.types import Delta, FinishReason, SamplingParams
from planaria.wire import EngineStats, Output, Submit
from tests.pure.test_kept import head

VERSIONS = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def spread(runs: list[tuple[int, int]], count: int) -> list[int]:
    """Of each token from the first run's on."""
    ends = [first for first, _ in runs[1:]] + [count]
    return [number for (first, number), end in zip(runs, ends, strict=True) for _ in range(first, end)]


def deltas(versions: list[int]) -> list[Delta]:
    last = len(versions) - 1
    return [
        Delta("a", at, [at], FinishReason.LENGTH if at == last else None, weights=number)
        for at, number in enumerate(versions)
    ]


@given(VERSIONS, st.integers(1, 4), st.data())
def test_each_token_says_the_same(versions: list[int], joined: int, data: st.DataObject) -> None:
    """joined: steps that are one, since their client reads slowly."""
    stream, told, held = Stream(Submit("a", [1], SamplingParams(), 0, 99)), list[int](), list[Piece]()
    given = deltas(versions)
    for at in range(0, len(given), joined):
        steps = _Steps(Output([given[at]], EngineStats()))
        for delta in given[at + 1 : at + joined]:
            steps.take(Output([delta], EngineStats()))
        for delta in steps.output().deltas:
            piece = stream.take(delta)
            assert piece is not None and stream.take(delta) is None, "a repeated one says nothing"
            held.append(piece)
            if piece.finish is not None or data.draw(st.booleans()):  # else its client doesn't read
                first, *later = held
                for each in later:
                    first.join(each)
                held = []
                fields = versions_of(stream, first)
                runs = fields.get("weights_versions") or [(len(told), fields.get("weights_version", 0))]
                if first.finish is not None:
                    runs = fields.get("weights_versions") or [(0, 0)]
                    told = []
                told += spread(runs, len(told) + len(first.tokens) if first.finish is None else len(versions))
                assert fields.get("weights_version", 0) == versions[len(told) - 1]
    assert told == versions == spread(version_runs(stream.versions), len(versions))


@given(VERSIONS)
def test_what_is_kept_of_a_response_says_it(versions: list[int]) -> None:
    kept = Kept(head(1))
    written = frame(kept.head)
    for number in versions:
        written += kept.add(PieceRecord([7, 8], "x", None, number))
    half = Kept.of(scan(written)[0])
    assert half is not None and half.weights == versions
    shorter = Kept.of(scan(half.file())[0])
    assert shorter is not None and (shorter.weights, shorter.versions) == (versions, kept.versions)
    written += kept.add(PieceRecord([], "", Outcome("completed", 1)))
    kept.written(kept.count)
    for data in (written, kept.file()):
        again = Kept.of(scan(data)[0])
        assert again is not None and response_of(again) == response_of(kept)
        events = [json.loads(event_bytes(again, n).split(b"data: ")[1]) for n in range(num_events(again))]
        pieces = [event for event in events if event["type"].endswith(".delta")]
        assert [piece.get("weights_version", 0) for piece in pieces] == versions
    told = response_of(kept).get("weights_versions", [(0, 0)])
    assert spread(told, 2 * len(versions)) == [number for number in versions for _ in range(2)]


def test_an_engine_that_comes_up_with_others_computes_nothing_with_them() -> None:
    """Whoever asked for these was told that they are in force."""
    sent = list[Any]()
    engine: Any = SimpleNamespace(asleep=None, send=sent.append)
    config: Any = SimpleNamespace(weights_number=1, checkpoint={})
    facts: Any = SimpleNamespace(weights_number=0)
    EngineWishes(engine).came_up(facts, config)
    (asked,) = sent
    assert asked.number == 1 and not asked.beside
