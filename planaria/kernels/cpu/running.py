"""Runs a recording: its memory, the control words of its pieces, and what Python does between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.fields import ROW_WORDS
from planaria.kernels.cpu.memory import Region
from planaria.kernels.cpu.pack import up
from planaria.kernels.cpu.recorder import Recorder
from planaria.kernels.cpu.tape import Act, TapeRow
from planaria.kernels.cpu.team import Team

TapePart = tuple[dict[int, int], Callable[[], None] | None]  # control words of a part of the tape, what follows it


def runner(
    recorder: Recorder, result: Act | tuple[Act, ...], team: Callable[[], Team], zeros: int
) -> Callable[[], Any]:
    """See `Ops.compile`. team: those that run it when it is called. zeros: address of ZERO_BYTES of them."""
    tape, batch, lanes = recorder.tape, recorder.batch, recorder.lanes
    results = result if isinstance(result, tuple) else (result,)
    buffers = [act.buffer for act in results]
    tape.fuse(buffers)
    memory = Region(max(tape.place(buffers), 1))
    rows = tape.encode(memory)
    scratch_bytes = up(recorder.scratch, 4096)
    scratch = Region(scratch_bytes * recorder.most)
    tickets = Region(max(len(rows), 1) * layout.TICKET_BYTES, huge=False)
    words = {
        layout.TAPE: int(rows.ctypes.data), layout.OPS: len(rows), layout.SCRATCH: scratch.address,
        layout.SCRATCH_BYTES: scratch_bytes, layout.TICKETS: tickets.address, layout.ZEROS: zeros,
        layout.COUNTS: int(batch.counts.ctypes.data),
    }  # fmt: skip
    outs = [(_view(recorder, memory, act)[:, : act.columns], act.rows) for act in results]
    pieces = _pieces(recorder, words, memory)
    found = [out for out, _ in outs]
    owners = (memory, scratch, tickets, rows, recorder.external, *recorder.owners)
    counts, natives = batch.counts, [comm for comm in (recorder.native_tp, recorder.native_cp) if comm is not None]

    def run() -> npt.NDArray[Any] | tuple[npt.NDArray[Any], ...]:
        tokens, sequences, samples = counts[:3].tolist()
        if tokens > batch.max_tokens or sequences > batch.max_seqs or samples > batch.max_samples:
            raise ValueError(
                f"a step of {tokens} tokens, {sequences} sequences, {samples} samples; this recording takes "
                f"{batch.max_tokens}, {batch.max_seqs}, {batch.max_samples}"
            )
        if lanes is not None:
            counts[layout.ROWS_ALL] = lanes.begin(tokens)
        for part, after in pieces:
            team().run(part, owners)
            if after is not None:
                after()
        for comm in natives:
            comm.check()
        for i, (out, rows) in enumerate(outs):
            if len(found[i]) != counts[rows]:  # else who reads it finds the same array
                found[i] = out[: counts[rows]]
        return found[0] if isinstance(result, Act) else tuple(found)

    return run


def _view(recorder: Recorder, memory: Region, act: Act) -> npt.NDArray[Any]:
    """All rows that there can be, with their padding; bfloat16 as its bits."""
    kind, item = (np.float32, 4) if act.dtype == "float32" else (np.uint16, 2)
    rows, buffer = recorder.rows(act.rows), act.buffer
    if buffer.address:
        flat = recorder.external[buffer.address].reshape(-1)[: rows * act.ld]
        return flat.view(kind).reshape(rows, act.ld // item)
    return memory.array(buffer.offset, kind, (rows, act.ld // item))


def _pieces(recorder: Recorder, words: dict[int, int], memory: Region) -> list[TapePart]:
    """The recording in one piece, or cut where Python must reach the other ranks."""
    rows, pieces, start = recorder.tape.rows, list[TapePart](), 0
    for end, row in enumerate([*rows, None]):
        if row is not None and row.between is None:
            continue
        place = {
            layout.TAPE: words[layout.TAPE] + start * ROW_WORDS * 8, layout.OPS: end - start,
            layout.TICKETS: words[layout.TICKETS] + start * layout.TICKET_BYTES,
        }  # fmt: skip
        pieces.append((words | place, None if row is None else _after(recorder, memory, row)))
        start = end + 1
    return pieces


def _after(recorder: Recorder, memory: Region, row: TapeRow) -> Callable[[], None]:
    """What Python does in this row's place, with those rows of its activations that the step has."""
    between, counts = row.between, recorder.batch.counts
    views = [(_view(recorder, memory, act), act.rows) for act in row.acts]
    assert between is not None
    return lambda: between(*(values[: counts[rows]] for values, rows in views))
