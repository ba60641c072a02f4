"""Ranks of one node that share memory: one segment (a memfd) per group, handed over as a descriptor.

Whoever starts the ranks calls `planaria.mesh.segment.create_segment` once for each group and epoch and gives every
member the descriptor; each makes a `SharedComm` on it. Nothing has a name, so nothing is left behind. The waiting and
adding is native code (collective.py), which holds no interpreter lock; `CpuOps` runs the same operations inside its own
recording, through `port`.

Rule: writing the fence word ends every wait on the segment, on all its ranks, within 0.02 s.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria.kernels.cpu import layout
from planaria.kernels.cpu.fields import CODE, ROW_WORDS, MeetOp, Operation, ReceiveOp, ReduceOp, SendOp
from planaria.kernels.cpu.memory import Region
from planaria.kernels.cpu.team import Team
from planaria.mesh.comm import DEADLINE, Array, CollectiveAborted, broadcast_by_messages, flat
from planaria.mesh.segment import FENCED

SLOT = 256 << 10  # bytes of one exchange of one lane
RING = 32  # slots from a rank to another: what `send` takes without the receiver
SPIN = 4000  # turns of a waiting loop, about 50 us
NAP_NS = 10_000_000  # a sleeper looks at the fence this often


def _layout(size: int, lanes: int, ring: int) -> tuple[int, int, int]:
    """Offsets of slots, of channels, of what follows; bytes."""
    slots = -(-(layout.FLAGS + size * lanes * layout.FLAG_BYTES) // 4096) * 4096
    channels = slots + 2 * size * lanes * SLOT
    end = channels + size * size * (layout.CHANNEL_BYTES + ring * SLOT)
    return slots, channels, -(-end // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY


class SharedComm:
    """A group of ranks on one node.

    fd: the group's segment; it is duplicated. members: world ranks by rank in the group. entry: the compiled kernels
    (`planaria.kernels.cpu.build.load`), of any flavour. lanes: threads of each rank that add up together, at most what
    the rank with the least threads has. crowded: there are more ranks and threads on the node than cores, so nobody
    spins. deadline: seconds to wait for a rank. Returns when all members are there; raises CollectiveAborted when not.

    `send` waits only where `ring` slots of SLOT bytes are on their way.
    """

    device = "cpu"

    def __init__(
        self, fd: int, rank: int, members: Sequence[int], entry: Any, *, lanes: int = 1, crowded: bool = False,
        deadline: float = DEADLINE, ring: int = RING,
    ) -> None:  # fmt: skip
        size = len(members)
        if not 2 <= size <= layout.MAX_RANKS or not 1 <= lanes <= layout.MAX_LANES:
            raise ValueError(f"a shared group of {size} ranks with {lanes} lanes")
        self.rank, self.size, self.members = rank, size, tuple(members)
        self.lanes, self.deadline = lanes, deadline
        self._fd = os.dup(fd)
        slots, channels, self._end = _layout(size, lanes, ring)
        self._map(self._end)  # only so that the file has its size
        self._segment = self._array(mmap.mmap(self._fd, self._end))
        self._words = self._segment[:4096].view(np.int64)
        self._port = Region(layout.PORT_WORDS * 8, huge=False)
        self.port = self._port.address
        port = self._port.array(0, np.int64, (layout.PORT_WORDS,))
        base = int(self._segment.ctypes.data)
        for word, value in {
            layout.PORT_SEGMENT: base, layout.PORT_RANK: rank, layout.PORT_SIZE: size, layout.PORT_LANES: lanes,
            layout.PORT_SPIN: 0 if crowded else SPIN, layout.PORT_DEADLINE: int(deadline * 1e9),
            layout.PORT_SLOTS: base + slots, layout.PORT_SLOT: SLOT, layout.PORT_CHANNELS: base + channels,
            layout.PORT_RING: ring, layout.PORT_NAP + 1: NAP_NS,
        }.items():  # fmt: skip
            port[word] = value
        self._failed = port[layout.PORT_FAILED : layout.PORT_FAILED + 1]
        self._window: tuple[int, npt.NDArray[np.uint8]] | None = None
        self._places: dict[str, tuple[int, int]] = {}  # of the window: where it begins, bytes
        self._reason = ""
        # what one operation called from Python needs: a tape of one row
        self._team = Team(entry, 1)
        self._row = Region(ROW_WORDS * 8, huge=False)
        self._fields = self._row.array(0, np.int64, (ROW_WORDS,))
        self._scratch = Region(layout.BIG, huge=False)
        self._tickets = Region(layout.TICKET_BYTES, huge=False)
        self._counts = np.ones(4, np.int64)
        self._control = {
            layout.TAPE: self._row.address, layout.OPS: 1, layout.SCRATCH: self._scratch.address,
            layout.SCRATCH_BYTES: layout.BIG, layout.TICKETS: self._tickets.address,
            layout.COUNTS: int(self._counts.ctypes.data),
        }  # fmt: skip
        self._words[layout.PIDS // 8 + rank] = os.getpid()
        try:
            self.meet()
        except CollectiveAborted:
            self.close()
            raise

    @staticmethod
    def _array(mapped: mmap.mmap) -> npt.NDArray[np.uint8]:
        return np.frombuffer(mapped, np.uint8)

    def _map(self, size: int) -> None:
        """Make the file at least so long. Members do it at the same time; it is sealed, so nobody makes it shorter."""
        if os.fstat(self._fd).st_size < size:
            with contextlib.suppress(PermissionError):  # another has made it longer meanwhile
                os.ftruncate(self._fd, size)

    def window(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory of `size` bytes or more that all ranks see. All call it together."""
        if self._window is None or self._window[0] < size:
            self.meet()
            self._map(self._end + size)
            self.meet()
            self._window = size, self._array(mmap.mmap(self._fd, size, offset=self._end))
        return self._window[1]

    def place(self, name: str, size: int) -> npt.NDArray[np.uint8]:
        """Of the window what has this name, and nothing else. All call it together."""
        start, had = self._places.get(name, (0, -1))
        if had < size:
            start = max((first + length for first, length in self._places.values()), default=0)
            self._places[name] = start, size
        return self.window(start + size)[start : start + size]

    def check(self) -> None:
        """Raise CollectiveAborted if an operation on this group, from here or from a recording, was given up."""
        if not self._failed[0]:
            return
        fence = int(self._words[0])
        if 1 <= fence <= self.size:
            lost = self.members[fence - 1]
            raise CollectiveAborted(
                (lost,), f"rank {lost} is gone, or did not come within {self.deadline:g} s, "
                f"as rank {self.members[self.rank]} noticed",
            )  # fmt: skip
        if FENCED < fence <= FENCED + self.size and fence - FENCED - 1 != self.rank:
            lost = self.members[fence - FENCED - 1]
            raise CollectiveAborted((lost,), f"rank {lost} gave up")
        raise CollectiveAborted((), self._reason or "the group was fenced")

    def _run(self, op: type[Operation], **fields: int) -> None:
        words = op.words()
        self._fields[CODE] = op.code
        for name, value in {"port": self.port, **fields}.items():
            self._fields[words[name]] = value
        self._team.run(self._control, None)
        if self._failed[0]:
            self.check()

    def meet(self) -> None:
        """Wait for all ranks."""
        self._run(MeetOp)

    def all_reduce(self, x: Array) -> None:
        data = flat(x)
        count = len(data)
        if count == 0:
            return
        if count % 16:
            padded = np.zeros(-(-count // 16) * 16, np.float32)
            padded[:count] = data
            self.all_reduce(padded)
            data[:] = padded[:count]
            return
        place = int(data.ctypes.data)
        self._run(ReduceOp, part=place, target=place, ld=4 * count, rows=layout.ROWS_TOKENS, add=0)

    def gather_columns(self, x: Array, columns: range, size: int) -> Array:
        rows = len(x)
        if rows == 0:
            return np.empty((0, size), np.float32)
        memory = self.window(4 * rows * size)
        self.meet()  # rank 0 has read what an earlier gather left there
        out = memory[: 4 * rows * size].view(np.float32).reshape(rows, size)
        out[:, columns.start : columns.stop] = x
        self.meet()
        return out

    def send(self, x: Array, to: int) -> None:
        data = flat(x)
        self._run(SendOp, peer=to, address=int(data.ctypes.data), size=data.nbytes)

    def receive(self, x: Array, source: int) -> None:
        data = flat(x)
        self._run(ReceiveOp, peer=source, address=int(data.ctypes.data), size=data.nbytes)

    def broadcast(self, x: Array, source: int = 0) -> None:
        broadcast_by_messages(self, x, source)

    def abort(self, reason: str) -> None:
        self._reason = reason
        if self._words[0] == 0:
            self._words[0] = FENCED + 1 + self.rank

    def close(self) -> None:
        """Forget the descriptor and end what others wait for from this rank; the memory goes with its last user."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._team.close()
