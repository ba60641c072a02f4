"""A rank's experts while they travel: what it has in memory, what it is sent, what goes into its slots.

Rule: what is received lies aside until `arrange`, so that nothing in use changes; what lies aside outlives the epoch.
All ranks of the expert group go through the same moves in the same order, each doing its part, over a group that steps
don't use: of the moves that aren't done, the first one has both of its ranks at it, so none waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from planaria.mesh.comm import Comm, Solo
from planaria.topology.experts import Move, slots_at, slots_of

if TYPE_CHECKING:
    from planaria.kernels.ops import Ops, Weight
    from planaria.layers.decoder import Model
    from planaria.layers.moe import Expert

FORM = 9  # numbers that a packed weight is told by


class Experts:
    """Of one model, over its epochs. prepare_thread: called in a thread of its own before that one touches weights."""

    def __init__(self, ops: Ops, model: Model, prepare_thread: Callable[[], None] = lambda: None) -> None:
        self.ops, self.model, self.blocks = ops, model, {block.number: block for block in model.blocks}
        self._load: npt.NDArray[np.int64] | None = None  # tokens by layer and expert, if anybody asks for them
        self.group: Comm = Solo()
        self.prepared = 0  # the last version that is all there
        self._prepare_thread = prepare_thread
        self._aside: dict[tuple[int, int], Expert] = {}  # by layer and expert
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def held(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Of each layer, experts in this rank's memory."""
        return tuple(
            (layer, tuple(sorted({*block.held, *(expert for at, expert in list(self._aside) if at == layer)})))
            for layer, block in self.blocks.items()
        )

    @property
    def bytes_aside(self) -> int:
        """What was received and is not in use."""
        return sum(self.ops.memory(weight).nbytes for expert in list(self._aside.values()) for weight in expert)

    def lacking(self, maps: Sequence[Sequence[int]], moves: Iterable[Move]) -> dict[int, list[int]]:
        """By layer, experts of this rank's slots that neither are here nor come from others."""
        coming = {(m.layer, m.expert) for m in moves if m.source is not None and m.target == self.group.rank}
        have = {(layer, expert) for layer, experts in self.held() for expert in experts}
        return {
            layer: [
                expert
                for expert in slots_at(maps[layer], self.group.size, self.group.rank)
                if (layer, expert) not in coming | have
            ]
            for layer in self.blocks
        }

    # -- load

    def count(self, wanted: bool) -> None:
        """Count from now on the tokens that choose each expert, or don't; before anything is compiled."""
        self._load = self.model.count_experts() if wanted else None
        if not wanted:
            for block in self.blocks.values():
                block.slots.load = None

    def take_load(self) -> bytes:
        """[layers, experts] int64, since the last time; between two steps."""
        if self._load is None:
            return b""
        self.ops.read_loads()
        load = self._load.tobytes()
        self._load[:] = 0
        return load

    # -- epochs

    def enter(self, group: Comm) -> None:
        """Travel over this group from now on."""
        self.group, self.prepared, self._failure = group, 0, None

    def leave(self) -> None:
        """The epoch is over, and its groups were aborted: wait until what was on its way has noticed."""
        self._join()
        self.group = Solo()

    # -- travelling

    def prepare(self, version: int, moves: Sequence[Move], *, aside: bool) -> None:
        """See `protocol.SendExperts`. Raises what an earlier exchange failed with."""
        self.settle()
        if moves and aside:
            self._thread = threading.Thread(target=self._beside, args=(version, moves), name="planaria-experts")
            self._thread.start()
        elif moves:
            self._exchange(version, moves)
        elif version > self.prepared:
            self.prepared = version

    def settle(self) -> None:
        """Wait for what is on its way. Raises what it failed with."""
        self._join()
        self.check()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def check(self) -> None:
        """Raises what an exchange beside steps failed with."""
        if self._failure is not None:
            raise self._failure

    def _beside(self, version: int, moves: Sequence[Move]) -> None:
        try:
            self._prepare_thread()
            self._exchange(version, moves)
        except Exception as e:
            self._failure = e
            # the others may wait for this rank, and no command is on its way to tell them
            self.group.abort(f"rank {self.group.members[self.group.rank]} failed in an exchange of experts: {e}")

    def _exchange(self, version: int, moves: Sequence[Move]) -> None:
        own = self.group.rank
        for move in moves:
            if move.layer not in self.blocks or move.source in (None, move.target):
                continue
            if move.source == own:
                self._send(self._find(move), move.target)
            elif move.target == own:
                assert move.source is not None
                self._lay_aside((move.layer, move.expert), self._receive(move.source))
        self.prepared = version

    def _lay_aside(self, key: tuple[int, int], came: Expert) -> None:
        """It may be there already: from a step that was not committed, or for another slot of the same step."""
        before, self._aside[key] = self._aside.get(key), came
        self._release(before or ())

    def _release(self, weights: Iterable[Weight]) -> None:
        for weight in weights:
            self.ops.release(weight)

    def _find(self, move: Move) -> Expert:
        expert = self.blocks[move.layer].held.get(move.expert) or self._aside.get((move.layer, move.expert))
        if expert is None:
            raise ValueError(f"rank {self.group.members[self.group.rank]} was to send expert {move.expert} of layer "
                             f"{move.layer}, which it hasn't got")  # fmt: skip
        return expert

    def _send(self, expert: Expert, to: int) -> None:
        forms = np.zeros((2, FORM), np.int64)
        for row, weight in zip(forms, expert, strict=True):
            form = self.ops.form(weight)
            row[: len(form) + 1] = len(form), *form
        self.group.send(forms, to)
        for weight in expert:
            self.group.send(self.ops.memory(weight), to)

    def _receive(self, source: int) -> Expert:
        forms = np.zeros((2, FORM), np.int64)
        self.group.receive(forms, source)
        gate_up, down = (self.ops.blank(form[1 : 1 + form[0]]) for form in forms.tolist())
        try:
            for weight in (gate_up, down):
                self.group.receive(self.ops.memory(weight), source)
        except Exception:
            self._release((gate_up, down))
            raise
        return gate_up, down

    def arrange(self, version: int, maps: Iterable[tuple[int, Sequence[int]]]) -> None:
        """See `protocol.PlaceExperts`. Raises ValueError where a slot's expert isn't here."""
        self.settle()
        if version > self.prepared:
            raise ValueError(f"version {version} of the experts was not prepared: the last one is {self.prepared}")
        for layer, experts in maps:
            block = self.blocks.get(layer)
            if block is None:
                continue
            for at, expert in [key for key in self._aside if key[0] == layer]:
                came = self._aside.pop((at, expert))
                if block.held.setdefault(expert, came) is not came:
                    self._release(came)
            missing = sorted(set(slots_at(experts, self.group.size, self.group.rank)) - set(block.held))
            if missing:
                raise ValueError(f"layer {layer}: expert {missing[0]} was not prepared")
            block.place(self.ops, experts, slots_of(len(experts), self.group.size, self.group.rank))
