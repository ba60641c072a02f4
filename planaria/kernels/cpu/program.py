"""The interpreter of a tape: which thread does what, in what order. The arithmetic is in the kernels it calls.

Written in the integer Python that compiler.py turns into machine code. Addresses and sizes are int64. `c` is the
address of the control block, `row` of the tape row being run. Every thread runs `execute`; a barrier ends each
operation. Nothing here allocates, fails or touches Python.
The rule: how work is cut depends on row counts only where the result does not (see micro.py).
"""

from __future__ import annotations

from planaria.kernels.cpu.collective import op_meet, op_receive, op_reduce, op_send
from planaria.kernels.cpu.layout import (
    ACC,
    ARRIVED,
    ATTEND,
    BIG,
    CODES,
    COUNTS,
    CURSOR,
    EMBED,
    FETCH,
    FEW_ROWS,
    FUSED_PANELS,
    GENERATION,
    IDLE,
    IDLE_SPIN,
    KEY_TILE,
    LINEAR,
    MEET,
    NORM,
    OPS,
    PHASE,
    PLAN,
    POINTERS,
    QUERY_ROWS,
    RECEIVE,
    REDUCE,
    ROPE,
    ROW_BLOCK,
    ROW_WORDS,
    SCRATCH,
    SCRATCH_BYTES,
    SEND,
    SHARED,
    SILU,
    SLEEPING,
    SPIN,
    STATE,
    STOP,
    STREAM_ROWS,
    SUMS,
    TAKE,
    TAPE,
    TEMP,
    THREADS,
    TICKET_BYTES,
    TICKETS,
    TRACE,
    WHOLE_ROWS,
    WIDE_ROWS,
    ZERO_BYTES,
    ZEROS,
)  # fmt: skip
from planaria.kernels.cpu.micro import DENSE, Q4_1, STORE_ACT, STORE_F32
from planaria.kernels.cpu.native import (
    FUTEX,
    atomic_add,
    atomic_get,
    atomic_put,
    clock,
    get,
    get32,
    pl_block_sums,
    pl_copy,
    pl_divide,
    pl_embed,
    pl_inline_rows,
    pl_item,
    pl_norm,
    pl_packed,
    pl_rotate,
    pl_settle,
    pl_silu,
    pl_softmax,
    pl_store_key,
    pl_store_value,
    pl_tile,
    pl_tile_panels,
    pl_tile_rows,
    pl_value_panels,
    pl_value_rows,
    pl_values,
    pl_wide,
    prefetch,
    put,
    put32,
    relax,
    syscall,
)  # fmt: skip

EXTRA = 0
ROPEF = 1
OL = 1

FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE = 128, 129

# Threads


def sleep_while(address: int, value: int) -> None:
    """Sleep unless the low half of the word at address is no longer `value`; wakes may be spurious."""
    syscall(FUTEX, address, FUTEX_WAIT_PRIVATE, value & 0xFFFFFFFF, 0, 0, 0)


def wake_all(address: int) -> None:
    syscall(FUTEX, address, FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, 0, 0, 0)


def barrier(c: int) -> None:
    """All threads arrive before any leaves. Spins a while, then sleeps."""
    threads = get(c, THREADS)
    if threads == 1:
        return
    phase = atomic_get(c, PHASE)
    if atomic_add(c, ARRIVED, 1) == threads - 1:
        put(c, ARRIVED, 0)
        atomic_put(c, PHASE, phase + 1)
        if atomic_get(c, SLEEPING) > 0:
            wake_all(c + PHASE * 8)
        return
    spins = get(c, SPIN)
    while atomic_get(c, PHASE) == phase:
        if spins > 0:
            spins -= 1
            relax()
        else:
            atomic_add(c, SLEEPING, 1)
            sleep_while(c + PHASE * 8, phase)
            atomic_add(c, SLEEPING, -1)


def grab(ticket: int, units: int, threads: int) -> int:
    """The next range of units, as start * 2^32 + end; empty when all are taken.

    Ranges shrink: the k-th takes 1 / (2 * threads) of what is left, so that few are needed and the last are small.
    """
    if threads == 1:
        return units if atomic_add(ticket, 0, 1) == 0 else 0
    turn = atomic_add(ticket, 0, 1)
    start = 0
    while start < units:
        size = (units - start) // (2 * threads)
        if size < 1:
            size = 1
        if turn == 0:
            return (start << 32) + start + size
        turn -= 1
        start += size
    return 0


def scratch(c: int, tid: int) -> int:
    return get(c, SCRATCH) + tid * get(c, SCRATCH_BYTES)


def share(n: int, tid: int, threads: int) -> int:
    """First of n rows that thread `tid` does."""
    return n * tid // threads


# Operations


def bring(address: int, size: int) -> None:
    """Ask for what another core may have written last."""
    for line in range(address, address + size, 64):
        prefetch(line)


def op_embed(c: int, row: int, tid: int) -> None:
    # 1 kind, 2 w, 3 panel bytes, 4 offset of scales, 5 steps or blocks, 6 out, 7 ldo, 8 tokens, 9 its tokens,
    # 10 the first of them, 11 are the others elsewhere (zeros for them)
    n, threads = get(get(c, COUNTS), 0), get(c, THREADS)
    for t in range(share(n, tid, threads), share(n, tid + 1, threads)):
        token = get32(get(row, 8), t) - get(row, 10)
        if token < 0 or token >= get(row, 9):
            if get(row, 11):
                clear(c, get(row, 6) + t * get(row, 7), get(row, 7))
                continue
            token = 0  # callers check; this only keeps a mistake from reading foreign memory
        panel = get(row, 2) + (token >> 4) * get(row, 3)
        pl_embed(get(row, 1), panel, panel + get(row, 4), token & 15, get(row, 5), get(row, 6) + t * get(row, 7))


def clear(c: int, place: int, size: int) -> None:
    """Zeros over `size` bytes."""
    done = 0
    while done < size:
        pl_copy(place + done, get(c, ZEROS), min(ZERO_BYTES, size - done))
        done += ZERO_BYTES


def op_norm(c: int, row: int, tid: int) -> None:
    # 1 x, 2 ldx, 3 weight, 4 out, 5 ldo, 6 padded, 7 count, 8 eps, 9 rows
    n, threads = get(get(c, COUNTS), get(row, 9)), get(c, THREADS)
    for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
        x, out = get(row, 1) + r * get(row, 2), get(row, 4) + r * get(row, 5)
        bring(x + get(row, 2), get(row, 2))
        pl_norm(x, get(row, 3), out, get(row, 6), get(row, 7), get(row, 8))


def op_silu(c: int, row: int, tid: int) -> None:
    # 1 x, 2 ldx, 3 out, 4 ldo, 5 half, 6 padded, 7 rows
    n, threads = get(get(c, COUNTS), get(row, 7)), get(c, THREADS)
    for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
        x, half = get(row, 1) + r * get(row, 2), get(row, 5)
        pl_silu(x, x + half * pl_item(), get(row, 3) + r * get(row, 4), half, get(row, 6))


def op_take(c: int, row: int, tid: int) -> None:
    # 1 x, 2 ld, 3 out, 4 sample_index
    n, threads = get(get(c, COUNTS), 2), get(c, THREADS)
    for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
        source = get(row, 1) + get32(get(row, 4), r) * get(row, 2)
        pl_copy(get(row, 3) + r * get(row, 2), source, get(row, 2))


def foresee(c: int, row: int, mine: int, most: int) -> int:
    """Choose up to `most` lines of keys and values of the next attention to come into the cache now: how many, their
    address in PLAN. Each thread walks over every so many-th sequence; attention sets it back to the start."""
    attend, s = get(row, 16), get(mine + CURSOR, 0)
    if attend == 0 or s >= get(get(c, COUNTS), 1):
        return 0
    at, line = get(mine + CURSOR, 1), get(mine + CURSOR, 2)
    table = get(attend, 17) + get32(get(attend, 16), s) * get(attend, 18)
    lines = get(attend, 6) >> 6  # of a block
    count = min(lines - line, most)
    put(mine + PLAN, 2, get(attend, 5) + get32(table, at) * get(attend, 6) + line * 64)
    line += count
    if line == lines:
        line = 0
        at += 1
        if at * get(attend, 8) >= get32(get(attend, 15), s):
            at = 0
            s += get(c, THREADS)
    put(mine + CURSOR, 0, s)
    put(mine + CURSOR, 1, at)
    put(mine + CURSOR, 2, line)
    return count


def foresee_list(c: int, row: int, mine: int, count: int, useless: int) -> None:
    """Addresses of 8 lines each for pl_wide to fetch; where there are no more, one of what is there already."""
    i = 0
    while i < count:
        lines = foresee(c, row, mine, 8 * (count - i)) if useless == 0 else 0
        if lines < 8:
            for k in range(i, count):
                put(mine + FETCH, k, mine + ACC)
            return
        for line in range(0, lines, 8):
            put(mine + FETCH, i, get(mine + PLAN, 2) + line * 64)
            i += 1


def product(
    c: int, row: int, mine: int, sums: int, first: int, last: int, panel: int, end: int, out: int, ldo: int, mode: int
) -> None:
    """Rows [first, last) x panels [panel, end) into out, where row `first`, panel `panel` begin."""
    kind, stride, length = get(row, 1), get(row, 3), get(row, 5)
    ldx = get(row, 7)
    x = get(row, 6) + first * ldx
    n = last - first
    wide = 16 * (pl_item() if mode == STORE_ACT else 4)
    lds = length * 4
    while panel < end:
        w, bias = get(row, 2) + panel * stride, get(row, 11) + panel * 64
        if kind != DENSE and n <= pl_inline_rows():
            pl_packed(n * 4 + kind, x, ldx, w, w + get(row, 4), length, out, ldo, mode, bias, sums, lds)
            panel += 1
            out += wide
            continue
        panels = pl_tile_panels() if n > STREAM_ROWS and end - panel >= pl_tile_panels() else 1
        if kind != DENSE:
            for r in range(0, n, WIDE_ROWS):
                rows = min(WIDE_ROWS, n - r)
                foresee_list(c, row, mine, rows // pl_tile_rows() * length, n > WHOLE_ROWS)
                pl_wide(
                    panels * 4 + kind, rows, x + r * ldx, ldx, w, w + get(row, 4), length, stride, mine + ACC,
                    sums + r * lds, lds, mine + CODES, mine + FETCH,
                )  # fmt: skip
                pl_settle(panels, rows, mine + ACC, out + r * ldo, ldo, mode, bias)
        else:
            for v in range(panels):
                put(mine + POINTERS, v, w + v * stride)
            for r in range(0, n, pl_tile_rows()):
                rows = min(pl_tile_rows(), n - r)
                # while these panels are used the next come into the cache, a part with each of the first tiles
                turn = r // pl_tile_rows()
                put(mine + PLAN, 0, w + (panels + turn) * stride)
                put(mine + PLAN, 1, length * 4 if turn < panels else 0)
                put(mine + PLAN, 3, 0)
                if panels > 1 and n <= WHOLE_ROWS:
                    put(mine + PLAN, 3, 8 * foresee(c, row, mine, length >> 1))
                pl_tile(
                    rows * 4 + panels, x + r * ldx, ldx, mine + POINTERS, length, out + r * ldo, ldo, mode, bias,
                    mine + PLAN,
                )  # fmt: skip
        panel += panels
        out += panels * wide


def block(c: int, row: int, mine: int, sums: int, first: int, last: int, panel: int, end: int) -> None:
    """Rows [first, last) x panels [panel, end) of a linear operation."""
    half, out, ldo, mode = get(row, 13), get(row, 8), get(row, 9), get(row, 10)
    out += first * ldo
    wide = 16 * (pl_item() if mode == STORE_ACT else 4)
    my_sums = sums + first * get(row, 5) * 4
    if half == 0:
        product(c, row, mine, my_sums, first, last, panel, end, out + panel * wide, ldo, mode)
        return
    # 14: offset in scratch of two tiles [ROW_BLOCK][FUSED_PANELS * 16], gate and up; a few rows take all panels of
    # a tile from one place, then from the other, so that memory is read in long runs
    ld = FUSED_PANELS * wide
    gate = mine + get(row, 14)
    up = gate + ROW_BLOCK * ld
    most = FUSED_PANELS if last - first <= WHOLE_ROWS else pl_tile_panels()
    while panel < end:
        stop = min(end, panel + most)
        product(c, row, mine, my_sums, first, last, panel, stop, gate, ld, STORE_ACT)
        product(c, row, mine, my_sums, first, last, panel + half, stop + half, up, ld, STORE_ACT)
        count = (stop - panel) * 16
        for r in range(last - first):
            pl_silu(gate + r * ld, up + r * ld, out + r * ldo + panel * wide, count, count)
        panel = stop


def op_linear(c: int, row: int, tid: int, ticket: int) -> None:
    # 1 kind, 2 w, 3 panel bytes, 4 offset of scales, 5 steps or blocks, 6 x, 7 ldx, 8 out, 9 ldo, 10 mode, 11 bias,
    # 12 rows, 13 panels of one half of a fused silu (0: plain), 14 its scratch, 15 panels
    n, threads = get(get(c, COUNTS), get(row, 12)), get(c, THREADS)
    if n == 0:
        return
    mine = scratch(c, tid)
    if n <= WHOLE_ROWS:
        bring(get(row, 6), n * get(row, 7))
    sums = mine + SUMS
    if get(row, 1) == Q4_1:
        blocks = get(row, 5)
        if n <= FEW_ROWS and blocks * n * 4 <= BIG - SUMS:
            for r in range(n):
                pl_block_sums(get(row, 6) + r * get(row, 7), blocks, sums + r * blocks * 4)
        else:
            sums = get(c, SHARED)
            for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
                pl_block_sums(get(row, 6) + r * get(row, 7), blocks, sums + r * blocks * 4)
            barrier(c)
    panels = get(row, 13)
    if panels == 0:
        panels = get(row, 15)
    if n <= STREAM_ROWS:
        while True:
            taken = grab(ticket, panels, threads)
            if taken == 0:
                return
            block(c, row, mine, sums, 0, n, taken >> 32, taken & 0xFFFFFFFF)
    most = pl_tile_panels()
    groups = (panels + most - 1) // most
    units = groups * ((n + ROW_BLOCK - 1) // ROW_BLOCK)
    while True:
        taken = grab(ticket, units, threads)
        if taken == 0:
            return
        for u in range(taken >> 32, taken & 0xFFFFFFFF):
            first, group = (u // groups) * ROW_BLOCK, (u % groups) * most
            block(c, row, mine, sums, first, min(n, first + ROW_BLOCK), group, min(panels, group + most))


def op_rope(c: int, row: int, tid: int) -> None:
    # 1 qkv, 2 ldx, 3 out, 4 ldo, 5 cache, 6 block bytes, 7 key bytes, 8 block size, 9 heads, 10 kv heads, 11 dim,
    # 12 cos, 13 sin, 14 half, 15 q_norm, 16 k_norm, 17 eps, 18 slots, 19 positions
    n, threads = get(get(c, COUNTS), 0), get(c, THREADS)
    slots = get(row, 18)
    # tokens of one chunk of 16 are written by one thread: the first clears the chunk, two share each word
    start, end = share(n, tid, threads), share(n, tid + 1, threads)
    while 0 < start < n and get(slots, start) & 15 and get(slots, start - 1) == get(slots, start) - 1:
        start += 1
    while 0 < end < n and get(slots, end) & 15 and get(slots, end - 1) == get(slots, end) - 1:
        end += 1
    dim, heads, kv_heads, half = get(row, 11), get(row, 9), get(row, 10), get(row, 14)
    head = dim * pl_item()
    temp = scratch(c, tid) + TEMP
    size, chunk = get(row, 8), 16 * head
    per_head = (size >> 4) * 2 * chunk
    eps = get(row, 17)
    for t in range(start, end):
        x = get(row, 1) + t * get(row, 2)
        q = get(row, 3) + t * get(row, 4)
        position = get32(get(row, 19), t)
        cos, sin = (get(row, 12) + position * half * 4, get(row, 13) + position * half * 4)
        bring(x + get(row, 2), get(row, 2))
        for h in range(heads):
            pl_rotate(x + h * head, q + h * head, temp, cos, sin, half, dim, get(row, 15), eps)
        slot = get(slots, t)
        offset = slot % size
        place = get(row, 5) + (slot // size) * get(row, 6) + (offset >> 4) * 2 * chunk
        token = offset & 15
        for h in range(kv_heads):
            k = x + (heads + h) * head
            pl_rotate(k, temp + 2048, temp, cos, sin, half, dim, get(row, 16), eps)
            pl_store_key(temp + 2048, place + h * per_head + token * 4, head >> 2)
            v = x + (heads + kv_heads + h) * head
            pl_store_value(v, place + chunk + h * per_head, token, dim)


def attend_tile(c: int, row: int, mine: int, s: int, h: int, first: int, count: int) -> None:
    """Tokens [first, first + count) of sequence s, for the query heads of key head h."""
    item = pl_item()
    size, dim = get(row, 8), get(row, 11)
    group = get(row, 9) // get(row, 10)
    head = dim * item
    rows = count * group
    begin = get32(get(row, 14), s)
    new = get32(get(row, 14), s + 1) - begin
    position = get32(get(row, 15), s) - new + first  # of token `first`
    keys = position + count  # that the last token sees
    window = get(row, 13)
    table = get(row, 17) + get32(get(row, 16), s) * get(row, 18)
    chunk = 16 * head
    base = get(row, 5) + h * (size >> 4) * 2 * chunk
    tall = max(rows, QUERY_ROWS)
    q = mine + BIG
    scores = q + tall * head
    p = scores + tall * KEY_TILE * 4
    o = p + tall * KEY_TILE * item
    kp, vp = mine + POINTERS, mine + POINTERS + 1024
    state = mine + STATE
    for i in range(count):
        source = get(row, 1) + (begin + first + i) * get(row, 2) + h * group * head
        pl_copy(q + i * group * head, source, group * head)
    for r in range(rows):
        put32(state, 4 * r, -246811958)  # float32 bits of LOWEST
        put32(state, 4 * r + 1, 0)
    for i in range(rows * dim // 2):
        put(o, i, 0)
    start = 0
    if window > 0:
        start = max(0, position - window + 1) // KEY_TILE * KEY_TILE
    while start < keys:
        chunks = (min(KEY_TILE, keys - start) + 15) >> 4
        for i in range(chunks):
            key = start + 16 * i
            place = base + get32(table, key // size) * get(row, 6) + ((key % size) >> 4) * 2 * chunk
            put(kp, i, place)
            put(vp, i, place + chunk)
            for line in range(place, place + 2 * chunk, 256):
                prefetch(line)  # one in four: the core fetches their neighbours by itself
        i = 0
        while i < chunks:
            panels = pl_tile_panels() if chunks - i >= pl_tile_panels() else 1
            r = 0
            while r < rows:
                some = min(pl_tile_rows(), rows - r)
                pl_tile(
                    some * 4 + panels, q + r * head, head, kp + 8 * i, head >> 2, scores + (r * KEY_TILE + 16 * i) * 4,
                    KEY_TILE * 4, STORE_F32, get(c, ZEROS), get(c, ZEROS),
                )  # fmt: skip
                r += some
            i += panels
        for i in range(count):
            at = position + i
            lo = 0
            if window > 0:
                lo = max(0, at - window + 1 - start)
            hi = min(at + 1 - start, chunks * 16)
            for g in range(group):
                r = i * group + g
                pl_softmax(
                    scores + r * KEY_TILE * 4,
                    p + r * KEY_TILE * item,
                    chunks * 16,
                    lo,
                    hi,
                    get(row, 12),
                    state + 16 * r,
                )
        v, all_panels = 0, dim >> 4
        while v < all_panels:
            panels = pl_value_panels() if all_panels - v >= pl_value_panels() else 1
            r = 0
            while r < rows:
                some = min(pl_value_rows(), rows - r)
                pl_values(
                    some * 8 + panels, panels, p + r * KEY_TILE * item, KEY_TILE * item, vp, chunks, v * 256 * item,
                    o + (r * dim + 16 * v) * 4, dim * 4, state + 16 * r,
                )  # fmt: skip
                r += some
            v += panels
        start += KEY_TILE
    for i in range(count):
        place = get(row, 3) + (begin + first + i) * get(row, 4) + h * group * head
        for g in range(group):
            r = i * group + g
            pl_divide(o + r * dim * 4, state + 16 * r, place + g * head, dim)


def op_attend(c: int, row: int, tid: int, ticket: int) -> None:
    # 1 q, 2 ldq, 3 out, 4 ldo, 5 cache, 6 block bytes, 7 key bytes, 8 block size, 9 heads, 10 kv heads, 11 dim,
    # 12 scale, 13 window, 14 seq_start, 15 seq_len, 16 seq_row, 17 block_table, 18 bytes of its rows
    sequences, kv_heads = get(get(c, COUNTS), 1), get(row, 10)
    group = get(row, 9) // kv_heads
    tokens = max(1, QUERY_ROWS // group)
    mine = scratch(c, tid)
    put(mine + CURSOR, 0, tid)
    put(mine + CURSOR, 1, 0)
    put(mine + CURSOR, 2, 0)
    s, passed = 0, 0  # units of the sequences before s
    unit = atomic_add(ticket, 0, 1)
    while s < sequences:
        new = get32(get(row, 14), s + 1) - get32(get(row, 14), s)
        tiles = (new + tokens - 1) // tokens
        if unit >= passed + tiles * kv_heads:
            passed += tiles * kv_heads
            s += 1
            continue
        within = unit - passed
        first = (tiles - 1 - within // kv_heads) * tokens  # the longest first
        attend_tile(c, row, mine, s, within % kv_heads, first, min(tokens, new - first))
        unit = atomic_add(ticket, 0, 1)


def execute(c: int, tid: int) -> None:
    tape, tickets = get(c, TAPE), get(c, TICKETS)
    for i in range(get(c, OPS)):
        row, ticket = tape + i * ROW_WORDS * 8, tickets + i * TICKET_BYTES
        code = get(row, 0)
        if code == LINEAR:
            op_linear(c, row, tid, ticket)
        elif code == NORM:
            op_norm(c, row, tid)
        elif code == ATTEND:
            op_attend(c, row, tid, ticket)
        elif code == ROPE:
            op_rope(c, row, tid)
        elif code == EMBED:
            op_embed(c, row, tid)
        elif code == TAKE:
            op_take(c, row, tid)
        elif code == SILU:
            op_silu(c, row, tid)
        elif code == REDUCE:
            op_reduce(c, row, tid, scratch(c, tid) + TEMP)
        elif code == MEET:
            op_meet(row, tid)
        elif code == SEND:
            op_send(row, tid)
        elif code == RECEIVE:
            op_receive(row, tid)
        barrier(c)
        if tid == 0 and get(c, TRACE):
            put(get(c, TRACE), i, clock())


def lead(c: int, tid: int) -> None:
    """Run the tape once, as thread 0."""
    tickets = get(c, TICKETS)
    for i in range(get(c, OPS)):
        put(tickets + i * TICKET_BYTES, 0, 0)
        put(tickets + i * TICKET_BYTES, 8, 0)
    atomic_add(c, GENERATION, 1)
    if atomic_get(c, IDLE) > 0:
        wake_all(c + GENERATION * 8)
    execute(c, tid)


def follow(c: int, tid: int) -> None:
    """Wait for runs and take part in them, until stopped."""
    seen = 0
    while True:
        spins = get(c, IDLE_SPIN)
        while atomic_get(c, GENERATION) == seen:
            if spins > 0:
                spins -= 1
                relax()
            else:
                atomic_add(c, IDLE, 1)
                sleep_while(c + GENERATION * 8, seen)
                atomic_add(c, IDLE, -1)
        seen += 1
        if atomic_get(c, STOP):
            return
        execute(c, tid)


def entry(c: int, tid: int) -> None:
    """What Python calls: thread 0 runs the tape and returns, the others stay until the team is stopped."""
    if tid == 0:
        lead(c, tid)
    else:
        follow(c, tid)
