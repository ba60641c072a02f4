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
fence with the rank's number. After that all of these operations do nothing: the step ends in milliseconds.
"""

from __future__ import annotations

from planaria.kernels.cpu.layout import (
    CHANNEL_BYTES,
    COUNTS,
    FLAG_BYTES,
    FLAGS,
    PIDS,
    PORT_CHANNELS,
    PORT_CLOCKS,
    PORT_DEADLINE,
    PORT_FAILED,
    PORT_LANES,
    PORT_NAP,
    PORT_RANK,
    PORT_RING,
    PORT_SEGMENT,
    PORT_SIZE,
    PORT_SLOT,
    PORT_SLOTS,
    PORT_SPIN,
    SUM_PIECE,
)  # fmt: skip
from planaria.kernels.cpu.native import (
    CLOCK_GETTIME,
    FUTEX,
    KILL,
    atomic_add,
    atomic_get,
    atomic_put,
    get,
    pl_copy,
    pl_put_past,
    pl_sum,
    relax,
    syscall,
)  # fmt: skip

FUTEX_WAIT, FUTEX_WAKE = 0, 1
CLOCK_MONOTONIC = 1
FEW_BYTES = 16384  # a sum that one lane does alone
PAST_BYTES = 8192  # a part that others get from memory: their caches are farther away
ONE_SECOND = 1000000000
SOON = 20000000  # ns of waiting after which a rank is looked at


def nanoseconds(p: int, lane: int) -> int:
    """Of a clock that only goes on."""
    place = p + (PORT_CLOCKS + 2 * lane) * 8
    syscall(CLOCK_GETTIME, CLOCK_MONOTONIC, place, 0, 0, 0, 0)
    return get(place, 0) * ONE_SECOND + get(place, 1)


def fail(p: int, who: int) -> int:
    """Raise the fence for the rank `who`, unless it is up, and end the operations of this rank."""
    if atomic_get(get(p, PORT_SEGMENT), 0) == 0:
        atomic_put(get(p, PORT_SEGMENT), 0, who + 1)
    atomic_put(p, PORT_FAILED, 1)
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
            pid = get(get(p, PORT_SEGMENT) + PIDS, who)
            if pid > 0 and syscall(KILL, pid, 0, 0, 0, 0, 0) != 0:
                gone = 1
        if gone or waited > get(p, PORT_DEADLINE) or atomic_get(get(p, PORT_SEGMENT), 0) != 0:
            if atomic_get(word, 0) < value:  # it may have come before it went
                arrived = fail(p, who)
            break
        syscall(FUTEX, word, FUTEX_WAIT, seen & 0xFFFFFFFF, p + PORT_NAP * 8, 0, 0)
    atomic_add(word, 1, -1)
    return arrived


def reached(p: int, lane: int, word: int, value: int, who: int) -> int:
    """Wait until the word at address `word`, which rank `who` raises, is at least `value`; 0 if that will not be."""
    spins = get(p, PORT_SPIN)
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
        syscall(FUTEX, word, FUTEX_WAKE, 0x7FFFFFFF, 0, 0, 0)


def flag(p: int, rank: int, lane: int) -> int:
    return get(p, PORT_SEGMENT) + FLAGS + (rank * get(p, PORT_LANES) + lane) * FLAG_BYTES


def slot(p: int, rank: int, lane: int, exchange: int) -> int:
    place = ((exchange & 1) * get(p, PORT_SIZE) + rank) * get(p, PORT_LANES) + lane
    return get(p, PORT_SLOTS) + place * get(p, PORT_SLOT)


def all_reached(p: int, lane: int, value: int) -> int:
    """Wait for the flags of all ranks."""
    for rank in range(get(p, PORT_SIZE)):
        if reached(p, lane, flag(p, rank, lane), value, rank) == 0:
            return 0
    return 1


def exchange(p: int, temp: int, lane: int, source: int, target: int, size: int, add: int) -> None:
    """target (+)= the sum of all ranks' `size` bytes (a multiple of 64) of float32 at source."""
    ranks, rank, most = get(p, PORT_SIZE), get(p, PORT_RANK), get(p, PORT_SLOT)
    number = atomic_get(flag(p, rank, lane), 0)
    done = 0
    while done < size:
        some = min(most, size - done)
        if all_reached(p, lane, number) == 0:
            return
        number += 1
        if some > PAST_BYTES:
            pl_put_past(slot(p, rank, lane, number), source + done, some)
        else:
            pl_copy(slot(p, rank, lane, number), source + done, some)
        raised(flag(p, rank, lane), number)
        if all_reached(p, lane, number) == 0:
            return
        at = 0
        while at < some:
            piece = min(SUM_PIECE, some - at)
            out = target + done + at
            into = out if add == 0 else temp
            pl_sum(into, slot(p, 0, lane, number) + at, slot(p, 1, lane, number) + at, piece >> 2)
            for other in range(2, ranks):
                pl_sum(into, into, slot(p, other, lane, number) + at, piece >> 2)
            if add:
                pl_sum(out, out, temp, piece >> 2)
            at += piece
        done += some


def op_reduce(c: int, row: int, tid: int, temp: int) -> None:
    # 1 port, 2 part, 3 target, 4 bytes of a row, 5 rows, 6 add to the target; part may be the target if not
    p, size = get(row, 1), get(get(c, COUNTS), get(row, 5)) * get(row, 4)
    if atomic_get(p, PORT_FAILED):
        return
    lanes = get(p, PORT_LANES) if size > FEW_BYTES else 1
    if tid >= lanes:
        return
    lines = size >> 6
    first, last = (lines * tid // lanes) << 6, (lines * (tid + 1) // lanes) << 6
    exchange(p, temp, tid, get(row, 2) + first, get(row, 3) + first, last - first, get(row, 6))


def op_meet(row: int, tid: int) -> None:
    # 1 port; nobody leaves before all have come
    p = get(row, 1)
    if tid > 0 or atomic_get(p, PORT_FAILED):
        return
    mine = flag(p, get(p, PORT_RANK), 0)
    number = atomic_get(mine, 0) + 1
    raised(mine, number)
    all_reached(p, 0, number)


def channel(p: int, source: int, target: int) -> int:
    """The ring from one rank to another: two lines of [number, sleepers], of what was sent and received; slots."""
    size = CHANNEL_BYTES + get(p, PORT_RING) * get(p, PORT_SLOT)
    return get(p, PORT_CHANNELS) + (source * get(p, PORT_SIZE) + target) * size


def op_send(row: int, tid: int) -> None:
    # 1 port, 2 peer, 3 address, 4 bytes; waits where the ring is full
    p, peer, source, size = get(row, 1), get(row, 2), get(row, 3), get(row, 4)
    if tid > 0 or atomic_get(p, PORT_FAILED):
        return
    ring, most = get(p, PORT_RING), get(p, PORT_SLOT)
    place = channel(p, get(p, PORT_RANK), peer)
    sent, done = atomic_get(place, 0), 0
    while done < size:
        if reached(p, 0, place + FLAG_BYTES, sent - ring + 1, peer) == 0:
            return
        some = min(most, size - done)
        pl_copy(place + CHANNEL_BYTES + sent % ring * most, source + done, some)
        sent += 1
        raised(place, sent)
        done += some


def op_receive(row: int, tid: int) -> None:
    # 1 port, 2 peer, 3 address, 4 bytes
    p, peer, target, size = get(row, 1), get(row, 2), get(row, 3), get(row, 4)
    if tid > 0 or atomic_get(p, PORT_FAILED):
        return
    ring, most = get(p, PORT_RING), get(p, PORT_SLOT)
    place = channel(p, peer, get(p, PORT_RANK))
    received, done = atomic_get(place + FLAG_BYTES, 0), 0
    while done < size:
        if reached(p, 0, place, received + 1, peer) == 0:
            return
        some = min(most, size - done)
        pl_copy(target + done, place + CHANNEL_BYTES + received % ring * most, some)
        received += 1
        raised(place + FLAG_BYTES, received)
        done += some
