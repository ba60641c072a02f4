"""How tokens reach the experts that they chose on ranks of other lanes, and how what these made of them comes back.

An expert group is the ranks of one stage in all lanes. In a step each rank has the tokens of its lane, which all tensor
ranks of the lane have alike, and computes its own experts' part of every token it is given. A way to exchange them is
an `All2All`; `make` finds one by its name in the registry (`planaria.config.all2all`).

Rule: all ranks of the group call `begin` once in each step (or `tell` and `count`, which it consists of), then
`dispatch` and `combine` in turn, as often as there are layers with experts, also with no token of their own. A token's
sum is over the ranks in their order, so that it depends on nothing but the token. A rank that does not come ends each
wait with CollectiveAborted.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any, Protocol

import msgspec

from planaria.config.all2all import EXCHANGES
from planaria.mesh.comm import Array, Comm


class All2All(Protocol):
    """`lanes`: how many there are; each has at most as many tokens in a step as another may have."""

    lanes: int

    def begin(self, num_tokens: int) -> int:
        """This rank's lane has so many tokens in this step. Returns how many rows `dispatch` brings."""

    def tell(self, number: int) -> list[int]:
        """A number of this lane, the same on its tensor ranks. Returns those of all lanes."""

    def count(self, counts: Sequence[int]) -> int:
        """Each lane has so many tokens from now on, as all ranks know. Returns what `begin` does."""

    def dispatch(self, parts: Sequence[Array], into: Sequence[Array]) -> None:
        """parts: [T, ...] each, contiguous: hidden values, then the slots and weights of the tokens' experts. into: of
        the same kinds, with the rows that `begin` told: tokens that this rank's experts may be asked for."""

    def combine(self, y: Array, out: Array) -> None:
        """y float32 [rows, H]: this rank's part of the tokens that `dispatch` brought. out float32 [T, H]: the sum of
        all ranks' parts of this lane's tokens."""


class Shapes(msgspec.Struct, frozen=True, kw_only=True):
    """Of an expert group."""

    max_tokens: int  # of a lane in a step
    width: int = 1  # tensor ranks of a lane, which have the same tokens and follow one another in the group
    num_slots: int  # of a layer's experts
    top_k: int  # experts of a token
    hidden_size: int


def make(name: str, group: Comm, shapes: Shapes, *, dealt: bool = False) -> All2All:
    """group: the expert group. dealt: tensor ranks share the exchange of their lane's tokens (sequence-parallel
    experts); libraries know by themselves. Raises ValueError for an unknown name, ImportError for a library that is
    missing."""
    way = EXCHANGES.get(name)
    if way is None:
        raise ValueError(f"there is no all-to-all {name!r}")
    module, _, maker = way.made_by.partition(":")
    make: Any = getattr(import_module(module), maker)
    if way.library:
        library: All2All = make(group, shapes)
        return library
    row = -(-shapes.hidden_size // 16) * 64  # bytes of a token's hidden values in float32, aligned
    made: All2All = make(group, shapes.width, (shapes.max_tokens, row), dealt=dealt)
    return made
