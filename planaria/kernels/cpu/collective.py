"""Ranks of one node that add up, wait for and hand over through shared memory. Part of the interpreter's program.

Written like program.py. `p` is the address of this rank's port (layout.PORT_*), the words that only it reads; the
segment it points to is mapped by all ranks: a fence word, their process ids, a flag per rank and lane, their slots,
and a ring from each rank to each other. A lane is a thread of each rank: thread t of every rank adds up the same
slice, and so waits only for threads t.

A reduction copies its part into this rank's slot (a larger one past the caches, which measured 3 to 4 times as fast
where cores don't share one: benchmarks/mesh_reduce.py), raises its flag to the number of the exchange, waits until all
flags are there and adds the slots in rank order, so all ranks get the same bits. Slots alternate: writing exchange s
needs all flags at s - 1, since then everybody has read s - 2. Every wait spins a little, then sleeps, and gives up
when the fence is raised, when the rank waited for is no process any more, or at the deadline; who gives up raises the
fence with the rank's number. After that all of these operations do nothing, and a run goes no further (layout.OVER).
"""

from __future__ import annotations

from planaria.kernels.cpu import fields, layout, native
from planaria.kernels.cpu.native import atomic_add, atomic_get, atomic_put, get, relax, syscall
from planaria.kernels.cpu.threads import scratch

FUTEX_WAIT, FUTEX_WAKE = 0, 1
CLOCK_MONOTONIC = 1
FEW_BYTES = 16384  # a sum that one lane does alone
PAST_BYTES = 8192  # a part that others get from memory: their caches are farther away
ONE_SECOND = 1000000000
SOON = 20000000  # ns of waiting after which a rank is looked at


def nanoseconds(p: int, lane: int) -> int:
    """Of a clock that only goes on."""
    place = p + (layout.PORT_CLOCKS + 2 * lane) * 8
    syscall(native.CLOCK_GETTIME, CLOCK_MONOTONIC, place, 0, 0, 0, 0)
    return get(place, 0) * ONE_SECOND + get(place, 1)


def fail(p: int, who: int) -> int:
    """Raise the fence for the rank `who`, unless it is up, and end the operations of this rank."""
    if atomic_get(get(p, layout.PORT_SEGMENT), 0) == 0:
        atomic_put(get(p, layout.PORT_SEGMENT), 0, who + 1)
    atomic_put(p, layout.PORT_FAILED, 1)
    return 0


def sleep_until(p: int, lane: int, word: int, value: int, who: int) -> int:
    """1 when the word at address `word` is at least `value`; its sleepers are counted in the word after it."""
    began = nanoseconds(p, lane)
    atomic_add(word, 1, 1)
    arrived = 1
    while True:
        seen = atomic_get(word, 0)
        if seen >= value:
            break
        waited = nanoseconds(p, lane) - began
        gone = 0
        if waited > SOON:
            pid = get(get(p, layout.PORT_SEGMENT) + layout.PIDS, who)
            if pid > 0 and syscall(native.KILL, pid, 0, 0, 0, 0, 0) != 0:
                gone = 1
        if gone or waited > get(p, layout.PORT_DEADLINE) or atomic_get(get(p, layout.PORT_SEGMENT), 0) != 0:
            if atomic_get(word, 0) < value:  # it may have come before it went
                arrived = fail(p, who)
            break
        syscall(native.FUTEX, word, FUTEX_WAIT, seen & 0xFFFFFFFF, p + layout.PORT_NAP * 8, 0, 0)
    atomic_add(word, 1, -1)
    return arrived


def reached(p: int, lane: int, word: int, value: int, who: int) -> int:
    """Wait until the word at address `word`, which rank `who` raises, is at least `value`; 0 if that will not be."""
    spins = get(p, layout.PORT_SPIN)
    while atomic_get(word, 0) < value:
        if spins <= 0:
            return sleep_until(p, lane, word, value, who)
        spins -= 1
        relax()
    return 1


def raised(word: int, value: int) -> None:
    """Set a word that others may wait for."""
    atomic_put(word, 0, value)
    if atomic_get(word, 1) > 0:
        syscall(native.FUTEX, word, FUTEX_WAKE, 0x7FFFFFFF, 0, 0, 0)


def flag(p: int, rank: int, lane: int) -> int:
    return get(p, layout.PORT_SEGMENT) + layout.FLAGS + (rank * get(p, layout.PORT_LANES) + lane) * layout.FLAG_BYTES


def slot(p: int, rank: int, lane: int, exchange: int) -> int:
    place = ((exchange & 1) * get(p, layout.PORT_SIZE) + rank) * get(p, layout.PORT_LANES) + lane
    return get(p, layout.PORT_SLOTS) + place * get(p, layout.PORT_SLOT)


def all_reached(p: int, lane: int, value: int) -> int:
    """Wait for the flags of all ranks."""
    for rank in range(get(p, layout.PORT_SIZE)):
        if reached(p, lane, flag(p, rank, lane), value, rank) == 0:
            return 0
    return 1


def exchange(p: int, temp: int, lane: int, source: int, target: int, size: int, add: int) -> None:
    """target (+)= the sum of all ranks' `size` bytes (a multiple of 64) of float32 at source."""
    ranks, rank, most = get(p, layout.PORT_SIZE), get(p, layout.PORT_RANK), get(p, layout.PORT_SLOT)
    number = atomic_get(flag(p, rank, lane), 0)
    done = 0
    while done < size:
        some = min(most, size - done)
        if all_reached(p, lane, number) == 0:
            return
        number += 1
        if some > PAST_BYTES:
            native.put_past(slot(p, rank, lane, number), source + done, some)
        else:
            native.copy(slot(p, rank, lane, number), source + done, some)
        raised(flag(p, rank, lane), number)
        if all_reached(p, lane, number) == 0:
            return
        at = 0
        while at < some:
            piece = min(layout.SUM_PIECE, some - at)
            out = target + done + at
            into = out if add == 0 else temp
            native.sum(into, slot(p, 0, lane, number) + at, slot(p, 1, lane, number) + at, piece >> 2)
            for other in range(2, ranks):
                native.sum(into, into, slot(p, other, lane, number) + at, piece >> 2)
            if add:
                native.sum(out, out, temp, piece >> 2)
            at += piece
        done += some


def op_reduce(c: int, row: fields.ReduceOp, tid: int) -> None:
    p, size = row.port, get(get(c, layout.COUNTS), row.rows) * row.ld
    if atomic_get(p, layout.PORT_FAILED):
        return
    lanes = get(p, layout.PORT_LANES) if size > FEW_BYTES else 1
    if tid >= lanes:
        return
    lines = size >> 6
    first, last = (lines * tid // lanes) << 6, (lines * (tid + 1) // lanes) << 6
    exchange(p, scratch(c, tid) + layout.TEMP, tid, row.part + first, row.target + first, last - first, row.add)


def op_meet(row: fields.MeetOp, tid: int) -> None:
    p = row.port
    if tid > 0 or atomic_get(p, layout.PORT_FAILED):
        return
    mine = flag(p, get(p, layout.PORT_RANK), 0)
    number = atomic_get(mine, 0) + 1
    raised(mine, number)
    all_reached(p, 0, number)


def channel(p: int, source: int, target: int) -> int:
    """The ring from one rank to another: two lines of [number, sleepers], of what was sent and received; slots."""
    size = layout.CHANNEL_BYTES + get(p, layout.PORT_RING) * get(p, layout.PORT_SLOT)
    return get(p, layout.PORT_CHANNELS) + (source * get(p, layout.PORT_SIZE) + target) * size


def op_send(row: fields.SendOp, tid: int) -> None:
    p, peer, source, size = row.port, row.peer, row.address, row.size
    if tid > 0 or atomic_get(p, layout.PORT_FAILED):
        return
    ring, most = get(p, layout.PORT_RING), get(p, layout.PORT_SLOT)
    place = channel(p, get(p, layout.PORT_RANK), peer)
    sent, done = atomic_get(place, 0), 0
    while done < size:
        if reached(p, 0, place + layout.FLAG_BYTES, sent - ring + 1, peer) == 0:
            return
        some = min(most, size - done)
        native.copy(place + layout.CHANNEL_BYTES + sent % ring * most, source + done, some)
        sent += 1
        raised(place, sent)
        done += some


def op_receive(row: fields.ReceiveOp, tid: int) -> None:
    p, peer, target, size = row.port, row.peer, row.address, row.size
    if tid > 0 or atomic_get(p, layout.PORT_FAILED):
        return
    ring, most = get(p, layout.PORT_RING), get(p, layout.PORT_SLOT)
    place = channel(p, peer, get(p, layout.PORT_RANK))
    received, done = atomic_get(place + layout.FLAG_BYTES, 0), 0
    while done < size:
        if reached(p, 0, place, received + 1, peer) == 0:
            return
        some = min(most, size - done)
        native.copy(target + done, place + layout.CHANNEL_BYTES + received % ring * most, some)
        received += 1
        raised(place + layout.FLAG_BYTES, received)
        done += some
