"""Which rank holds which experts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.topology.experts import STRATEGIES, ExpertMap


@pytest.mark.parametrize(
    ("made", "held"),
    [
        (ExpertMap.linear(4, 2), [(0, 1), (2, 3)]),
        (ExpertMap.round_robin(4, 2), [(0, 2), (1, 3)]),
        (ExpertMap.linear(8, 3), [(0, 1, 2), (3, 4, 5), (6, 7)]),  # earlier ranks hold one more
        (ExpertMap.round_robin(8, 3), [(0, 3, 6), (1, 4, 7), (2, 5)]),
        (ExpertMap.linear(4, 3, 2), [(0, 1), (2, 3), (0, 1)]),
        (ExpertMap.linear(2, 3, 1), [(0,), (1,), (0,)]),
        (ExpertMap.linear(2, 1, 3), [(0, 1, 0, 1, 0)]),
        (ExpertMap.round_robin(2, 3), [(0,), (1,), ()]),
    ],
)
@pytest.mark.row("P6", "P8")
def test_what_each_rank_holds(made: ExpertMap, held: list[tuple[int, ...]]) -> None:
    assert [made.of(rank) for rank in range(made.num_ranks)] == held


def test_a_map_without_an_expert_is_no_map() -> None:
    with pytest.raises(ValueError, match="no slot holds expert 1"):
        ExpertMap(3, 2, (0, 2))
    with pytest.raises(ValueError, match="no expert 3 among 3"):
        ExpertMap(3, 2, (0, 1, 2, 3))
    with pytest.raises(ValueError, match="at least one of each"):
        ExpertMap.linear(3, 0)
    for ask in (ExpertMap.linear(3, 2).of, ExpertMap.linear(3, 2).rank_of):
        with pytest.raises(ValueError, match="3 is not among"):
            ask(3)


@given(st.sampled_from(STRATEGIES), st.integers(1, 40), st.integers(1, 12), st.integers(0, 20))
def test_every_slot_is_on_one_rank_and_every_expert_has_one(strategy: str, experts: int, ranks: int, more: int) -> None:
    made = ExpertMap.placed(strategy, experts, ranks, more)
    assert made.num_redundant == more and sum(made.counts) == experts + more
    spans = [made.span(rank) for rank in range(ranks)]
    assert [slot for span in spans for slot in span] == list(range(experts + more))
    sizes = [len(span) for span in spans]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert all(made.rank_of(slot) == rank for rank, span in enumerate(spans) for slot in span)
    assert all(made.slots.count(expert) == count >= 1 for expert, count in enumerate(made.counts))
