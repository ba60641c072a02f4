"""How threads of a team share the work of one operation. Part of the interpreter's program.

Written like program.py. A barrier ends each operation; within one, ranges of its work are grabbed or dealt by rows.
"""

from __future__ import annotations

from planaria.kernels.cpu import layout, native
from planaria.kernels.cpu.native import atomic_add, atomic_get, atomic_put, get, prefetch, put, relax, syscall

FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129


def sleep_while(address: int, value: int) -> None:
    """Sleep unless the low half of the word at address is no longer `value`; wakes may be spurious."""
    syscall(native.FUTEX, address, FUTEX_WAIT_PRIVATE, value & 0xFFFFFFFF, 0, 0, 0)


def wake_all(address: int) -> None:
    syscall(native.FUTEX, address, FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, 0, 0, 0)


def keep_to(c: int, number: int) -> None:
    """This thread runs on the cores of that set from now on, where threads of this team have their own."""
    size = get(c, layout.CORES_BYTES)
    if size:
        syscall(native.SCHED_SETAFFINITY, 0, size, get(c, layout.CORES) + number * size, 0, 0, 0)


def barrier(c: int) -> None:
    """All threads arrive before any leaves. Spins a while, then sleeps."""
    threads = get(c, layout.THREADS)
    if threads == 1:
        return
    phase = atomic_get(c, layout.PHASE)
    if atomic_add(c, layout.ARRIVED, 1) == threads - 1:
        put(c, layout.ARRIVED, 0)
        atomic_put(c, layout.PHASE, phase + 1)
        if atomic_get(c, layout.SLEEPING) > 0:
            wake_all(c + layout.PHASE * 8)
        return
    spins = get(c, layout.SPIN)
    while atomic_get(c, layout.PHASE) == phase:
        if spins > 0:
            spins -= 1
            relax()
        else:
            atomic_add(c, layout.SLEEPING, 1)
            sleep_while(c + layout.PHASE * 8, phase)
            atomic_add(c, layout.SLEEPING, -1)


def grab(ticket: int, units: int, threads: int, together: int) -> int:
    """The next range of units, as start * 2^32 + end; empty when all are taken.

    Ranges shrink: the k-th takes 1 / (2 * threads) of what is left, so that few are needed and the last are small: of
    multiples of `together` as long as each thread may have one, then of one unit.
    """
    if threads == 1:
        return units if atomic_add(ticket, 0, 1) == 0 else 0
    turn = atomic_add(ticket, 0, 1)
    start = 0
    while start < units:
        left = units - start
        size = left // (2 * threads * together) * together
        if size == 0:
            size = together if left > together * threads else 1
        if turn == 0:
            return (start << 32) + start + size
        turn -= 1
        start += size
    return 0


def scratch(c: int, tid: int) -> int:
    return get(c, layout.SCRATCH) + tid * get(c, layout.SCRATCH_BYTES)


def share(n: int, tid: int, threads: int) -> int:
    """First of n rows that thread `tid` does."""
    return n * tid // threads


def rows_from(c: int, kind: int, tid: int) -> int:
    """The first of the step's rows of a kind that thread `tid` does."""
    return share(get(get(c, layout.COUNTS), kind), tid, get(c, layout.THREADS))


def bring(address: int, size: int) -> None:
    """Ask for what another core may have written last."""
    for line in range(address, address + size, 64):
        prefetch(line)


def whole_chunks(slots: int, t: int, n: int) -> int:
    """The first token from `t` on, of n, that does not go on with the chunk of 16 of the token before it. Tokens of one
    chunk are written by one thread: the first clears the chunk, two may share a word. Those below 0 are of other ranks,
    and those of a chunk may be among them."""
    while 0 < t < n:
        before, after = t - 1, t
        while before >= 0 and get(slots, before) < 0:
            before -= 1
        while after < n and get(slots, after) < 0:
            after += 1
        if before < 0 or after == n or get(slots, after) & 15 == 0 or get(slots, before) != get(slots, after) - 1:
            return t
        t = after + 1
    return t


def clear(c: int, place: int, size: int) -> None:
    """Zeros over `size` bytes."""
    done = 0
    while done < size:
        native.copy(place + done, get(c, layout.ZEROS), min(layout.ZERO_BYTES, size - done))
        done += layout.ZERO_BYTES
