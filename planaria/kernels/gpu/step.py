"""A step's inputs on a device, at addresses that stay: packed in main memory and copied at once.

Rule: what is recorded reads these places only. A step that is played again has as many rows as its recording, each with
as many tokens. Those that it lacks are of no sequence: they store nothing, see nothing, and nobody reads what comes of
them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planaria.kernels.ops import Batch
from planaria.kernels.reference import StepTensors

FEW = 8  # tokens of a sequence up to which its keys are split
BLOCK_Q = 16  # tokens of a tile where there are more
NOBODY = {"tokens": 0, "positions": 0, "slots": -2, "loras": -1}  # of a token of no sequence


@dataclass(frozen=True)
class QueryTiles:
    """Some of a step's sequences, in tiles of at most `block_q` tokens of one: its number and the tile's first token,
    int32. longest: keys of a sequence at most."""

    sequences: Tensor
    firsts: Tensor
    block_q: int
    longest: int


class Places:
    """For all steps of one function: int32 arrays, one behind the other, in main memory (`host`; pinned, where there is
    a GPU) and on the device (`here`); behind them the step's blocks, as many of each sequence, which go from there into
    `tables`. lines: of a recording, its tokens that are the batch's. hidden: what the stage before sent, float32
    [tokens, H]; None: nothing. step_positions: of all tokens of the step, where the batch is a `BatchShare` of it."""

    def __init__(self, batch: Batch, device: torch.device, most: int | None = None) -> None:
        """most: tokens of a step; None: as many as the batch has room for."""
        tokens, sequences = most or batch.step.max_tokens, batch.max_seqs
        sizes = {
            "tokens": tokens, "drawn_at": tokens, "positions": tokens, "slots": tokens, "loras": tokens,
            "starts": sequences + 1, "lengths": sequences, "sample_index": batch.max_samples,
            "tile_sequences": tokens + sequences, "tile_firsts": tokens + sequences, "lines": tokens,
            **({} if batch.step is batch else {"step_positions": tokens}),
        }  # fmt: skip
        pinned = device.type == "cuda"
        self.tables = torch.zeros(sequences, batch.block_table.shape[1], dtype=torch.int32, device=device)
        self._before = sum(sizes.values())
        self._host = torch.zeros(self._before + self.tables.numel(), dtype=torch.int32, pin_memory=pinned)
        self._here = torch.zeros_like(self._host, device=device)
        self.host: dict[str, Any] = {name: part.numpy() for name, part in _cut(self._host, sizes).items()}
        self.here = _cut(self._here, sizes)
        self._blocks: Any = self._host[self._before :].numpy()
        self._copied = torch.cuda.Event() if pinned else None  # type: ignore[no-untyped-call]
        self._shape, self._parts = (-1, -1), tuple[Tensor, ...]()  # of tables that were copied last, and what is copied
        self.hidden: Tensor | None = None
        self.laid = 0, 0  # rows of the recording that was laid out last, tokens of each
        self._followed = 0  # tokens that were drawn on the device, and are, in what was filled last
        self.host["drawn_at"][:] = -1

    def take_hidden(self, batch: Batch) -> None:
        """Make room for what the stage before sends, if it sends anything."""
        came = batch.arrived if batch.arrived is not None else batch.hidden
        if self.hidden is None and came is not None:
            self.hidden = torch.zeros(len(self.here["tokens"]), came.shape[1], device=self.tables.device)

    def put_hidden(self, batch: Batch, own: slice | Tensor) -> None:
        """What it sent, at tokens `own`."""
        if self.hidden is None or not (tokens := int(batch.counts[0])):
            return
        came = batch.arrived if batch.arrived is not None else torch.from_numpy(batch.hidden)[:tokens]
        self.hidden[own] = came.to(self.hidden)

    def copy(self, rows: int, width: int) -> None:
        """Queue the copies. rows, width: of the table. Whoever fills again waits until they are made."""
        if self._shape != (rows, width):
            self._shape, end = (rows, width), self._before + rows * width
            blocks = self._here[self._before : end].view(rows, width)
            self._parts = self._here[:end], self._host[:end], self.tables[:rows, :width], blocks
        here, host, tables, blocks = self._parts
        here.copy_(host, non_blocking=True)  # of contiguous memory, else torch takes a way through other memory
        tables.copy_(blocks)
        if self._copied is not None:
            self._copied.record()

    def take_drawn(self, batch: Batch) -> None:
        """Which of the batch's tokens are on the device alone."""
        followed = int(batch.counts[0]) if batch.follows else 0
        self.host["drawn_at"][followed : self._followed] = -1
        self.host["drawn_at"][:followed] = batch.drawn_at[:followed]
        self._followed = followed

    def take_tables(self, batch: Batch, longest: int, block_size: int) -> Any:
        """Blocks of the batch's sequences, the longest of which has so many tokens: [sequences, most of one]."""
        sequences, width = int(batch.counts[1]), min(self.tables.shape[1], -(-longest // block_size))
        into = self._blocks[: sequences * width].reshape(sequences, width)
        return np.take(batch.block_table[:, :width], batch.seq_row[:sequences], axis=0, out=into, mode="clip")

    def fill(self) -> dict[str, Any]:
        until(self._copied)
        return self.host


def until(event: Any) -> None:
    """Wait for a CUDA event, if there is one; mostly it was long ago, and nobody waits."""
    if event is not None and not event.query():
        event.synchronize()


def _cut(whole: Tensor, sizes: dict[str, int]) -> dict[str, Tensor]:
    return dict(zip(sizes, torch.split(whole[: sum(sizes.values())], [*sizes.values()]), strict=True))


def _one_each(places: Places, rows: int, each: int, longest: int) -> QueryTiles:
    """Of a recording: a tile for each row."""
    own = places.here["tile_sequences"][:rows], places.here["tile_firsts"][:rows]
    return QueryTiles(*own, 1 << (each - 1).bit_length(), longest)


def lay_out(batch: Batch, places: Places, block_size: int, rows: int, each: int, longest: int) -> slice | Tensor:
    """Put what the batch holds where a recording of so many rows, with so many tokens each, reads it: each sequence's
    tokens at the beginning of its own. longest: tokens of a sequence at most. Returns the recording's tokens that are
    the batch's, on the device."""
    host, sequences = places.fill(), int(batch.counts[1])
    starts, lengths = batch.seq_start[: sequences + 1], batch.seq_len[:sequences]
    used, total = int(starts[-1]), rows * each
    own: slice | Tensor = slice(used)
    if each == 1 and used == sequences:
        reach = lengths
        for name, nothing in NOBODY.items():
            host[name][:used] = getattr(batch, name)[:used]
            if used < total:
                host[name][used:total] = nothing
    else:
        counts = np.diff(starts)
        lines = np.arange(used) + np.repeat(np.arange(sequences) * each - starts[:-1], counts)
        for name, nothing in NOBODY.items():
            host[name][:total] = nothing
            host[name][lines] = getattr(batch, name)[:used]
        reach, own = lengths - counts + each, places.here["lines"][:used]
        host["lines"][:used] = lines
    host["lengths"][:sequences], host["lengths"][sequences:rows] = reach, 0
    places.take_drawn(batch)
    if places.laid != (rows, each):
        places.laid = rows, each
        host["starts"][: rows + 1] = np.arange(0, total + 1, each)
        host["tile_sequences"][:rows], host["tile_firsts"][:rows] = np.arange(rows), host["starts"][:rows]
        host["sample_index"][:total] = np.arange(total)
    places.copy(*places.take_tables(batch, longest, block_size).shape)
    places.put_hidden(batch, own)
    return own


class DeviceStep(StepTensors):
    """See Rule. block_size: tokens of a block here. put: stores rows [T, ...] in a cache at slots, but for those below
    0."""

    def __init__(
        self, batch: Batch, places: Places, block_size: int, put: Callable[[Tensor, Tensor, Tensor], None]
    ) -> None:
        tokens, sequences, self.samples, self.all_tokens = (int(n) for n in batch.counts[:4])
        every, samples = int(batch.step.counts[0]), int(batch.step.counts[2])
        self.first, self.shares = int(batch.counts[6]), batch.step is not batch
        host, self._put_rows = places.fill(), put
        self.device = places.tables.device
        self._hidden, self._arrived = batch.hidden, batch.arrived
        self._starts = batch.seq_start[: sequences + 1].astype(np.int64)
        self._lengths = batch.seq_len[:sequences].astype(np.int64)
        self._groups, self._masks = {}, {}
        self.longest = int(self._lengths.max(initial=1))
        self._tables = places.take_tables(batch, self.longest, block_size)
        for name in ("tokens", "positions", "loras"):
            host[name][:tokens] = getattr(batch, name)[:tokens]
        host["slots"][:every] = batch.slots[:every]
        if self.shares:
            host["step_positions"][:every] = batch.step.positions[:every]
        host["starts"][: sequences + 1], host["lengths"][:sequences] = self._starts, self._lengths
        host["sample_index"][:samples] = batch.sample_index[:samples]
        places.take_drawn(batch)
        counts = np.diff(self._starts)
        self.most = int(counts.max(initial=1))
        self.tiles = self._tiles(places, counts)
        places.copy(*self._tables.shape)
        self._view(places, tokens, sequences, samples, every)

    @classmethod
    def recorded(cls, places: Places, put: Callable[[Tensor, Tensor, Tensor], None], shape: Any) -> DeviceStep:
        """For a recording: what steps of this shape (sequences, tokens of each, most keys of one) will find there, once
        they are laid out."""
        (rows, each, longest), new = shape, cls.__new__(cls)
        new.device, new._put_rows, new.longest, new.most = places.tables.device, put, longest, each
        new._hidden = new._here = None
        new._arrived = places.hidden[: rows * each] if places.hidden is not None else None
        new.tiles = [_one_each(places, rows, each, longest)]
        new._view(places, rows * each, rows, rows * each, rows * each)
        return new

    def _view(self, places: Places, tokens: int, sequences: int, samples: int, every: int) -> None:
        """every: tokens of the step, of which `tokens` are of this rank."""
        here = places.here
        self.tokens, self.positions = here["tokens"][:tokens], here["positions"][:tokens]
        self.step_positions, self.drawn_at = self.positions, here["drawn_at"][:tokens]
        if self.shares:
            self.step_positions = here["step_positions"][:every]
        self.slots, self.loras = here["slots"][:every], here["loras"][:tokens]
        self.starts, self.lengths = here["starts"][: sequences + 1], here["lengths"][:sequences]
        self.sample_index, self.tables = here["sample_index"][:samples], places.tables[:sequences]

    def _tiles(self, places: Places, counts: Any) -> list[QueryTiles]:
        """Of those with few tokens, and of the others. counts: tokens of each sequence."""
        found, at = list[QueryTiles](), 0
        for chosen, block_q in ((counts <= FEW) & (counts > 0), 0), (counts > FEW, BLOCK_Q):
            members = np.flatnonzero(chosen)
            if not len(members):
                continue
            block_q = block_q or 1 << int(counts[members].max() - 1).bit_length()
            number = -(-counts[members] // block_q)
            end, within = (
                at + int(number.sum()),
                np.arange(number.sum()) - np.repeat(np.cumsum(number) - number, number),
            )
            places.host["tile_sequences"][at:end] = np.repeat(members, number)
            starts = places.host["starts"][members]
            places.host["tile_firsts"][at:end] = np.repeat(starts, number) + within * block_q
            longest = int(places.host["lengths"][members].max())
            own = places.here["tile_sequences"][at:end], places.here["tile_firsts"][at:end]
            found.append(QueryTiles(*own, block_q, longest))
            at = end
        return found

    def store(self, cache: Tensor, rows: Tensor) -> None:
        self._put_rows(cache, rows, self.slots)
