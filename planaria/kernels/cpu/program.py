"""The interpreter of a tape: which thread does what, in what order. The arithmetic is in the kernels it calls.

Written in the integer Python that compiler.py turns into machine code. Addresses and sizes are int64. `c` is the
address of the control block, `row` of the tape row being run. Every thread runs `execute`; a barrier ends each
operation. Nothing here allocates, fails or touches Python.
The rule: how work is cut depends on row counts only where the result does not (see micro.py).
"""

from __future__ import annotations

from planaria.kernels.cpu.collective import op_meet, op_receive, op_reduce, op_send
from planaria.kernels.cpu.grouped import op_combine, op_gate, op_grouped, op_rescale, op_route, op_sort, op_squares
from planaria.kernels.cpu.latent import op_by_head, op_latent
from planaria.kernels.cpu.layout import (
    ATTEND,
    BIG,
    BY_HEAD,
    COMBINE,
    COUNTS,
    CURSOR,
    EMBED,
    GATE,
    GENERATION,
    GROUPED,
    IDLE,
    IDLE_SPIN,
    KEY_TILE,
    LATENT,
    LINEAR,
    MEET,
    NORM,
    OPS,
    POINTERS,
    QUERY_ROWS,
    RECEIVE,
    REDUCE,
    RESCALE,
    ROPE,
    ROUTE,
    ROW_WORDS,
    SEND,
    SILU,
    SORT,
    SQUARES,
    STATE,
    STOP,
    TAKE,
    TAPE,
    TEMP,
    THREADS,
    TICKET_BYTES,
    TICKETS,
    TRACE,
    ZEROS,
)  # fmt: skip
from planaria.kernels.cpu.micro import STORE_F32
from planaria.kernels.cpu.native import (
    atomic_add,
    atomic_get,
    clock,
    get,
    get32,
    pl_copy,
    pl_divide,
    pl_embed,
    pl_item,
    pl_latent_rows,
    pl_latent_steps,
    pl_latents,
    pl_norm,
    pl_rotate,
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
    prefetch,
    put,
    put32,
    relax,
)  # fmt: skip
from planaria.kernels.cpu.products import op_linear
from planaria.kernels.cpu.threads import barrier, bring, clear, scratch, share, sleep_while, wake_all, whole_chunks

# Operations


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


def op_norm(c: int, row: int, tid: int) -> None:
    # 1 x, 2 ldx, 3 weight, 4 out, 5 ldo, 6 padded, 7 count, 8 eps, 9 rows, 10 is x of the activation dtype
    n, threads = get(get(c, COUNTS), get(row, 9)), get(c, THREADS)
    for r in range(share(n, tid, threads), share(n, tid + 1, threads)):
        x, out = get(row, 1) + r * get(row, 2), get(row, 4) + r * get(row, 5)
        bring(x + get(row, 2), get(row, 2))
        if get(row, 10):
            pl_rotate(x, out, scratch(c, tid) + BIG, 0, 0, 0, get(row, 7), get(row, 3), get(row, 8))
        else:
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


def op_rope(c: int, row: int, tid: int) -> None:
    # 1 qkv, 2 ldx, 3 out, 4 ldo, 5 cache, 6 block bytes, 7 key bytes, 8 block size, 9 heads, 10 kv heads, 11 dim,
    # 12 cos, 13 sin, 14 half, 15 q_norm, 16 k_norm, 17 eps, 18 slots, 19 positions
    n, threads = get(get(c, COUNTS), 0), get(c, THREADS)
    slots = get(row, 18)
    start = whole_chunks(slots, share(n, tid, threads), n)
    end = whole_chunks(slots, share(n, tid + 1, threads), n)
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
    size, dim = get(row, 8), get(row, 20)  # of values
    group = get(row, 9) // get(row, 10)
    head = get(row, 11) * item
    rows = count * group
    begin = get32(get(row, 14), s)
    new = get32(get(row, 14), s + 1) - begin
    position = get32(get(row, 15), s) - new + first  # of token `first`
    keys = position + count  # that the last token sees
    window = get(row, 13)
    table = get(row, 17) + get32(get(row, 16), s) * get(row, 18)
    chunk, both = 16 * head, get(row, 7)
    base = get(row, 5) + h * get(row, 19)
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
            place = base + get32(table, key // size) * get(row, 6) + ((key % size) >> 4) * both
            put(kp, i, place)
            put(vp, i, place + chunk)
            for line in range(place, place + both, 256):
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
        if get(row, 21):
            sum_keys(dim, rows, p, kp, chunks, o, state)
        else:
            sum_values(dim, rows, p, vp, chunks, o, state)
        start += KEY_TILE
    for i in range(count):
        place = get(row, 3) + (begin + first + i) * get(row, 4) + h * group * dim * item
        for g in range(group):
            r = i * group + g
            pl_divide(o + r * dim * 4, state + 16 * r, place + g * dim * item, dim)


def sum_values(dim: int, rows: int, p: int, vp: int, chunks: int, o: int, state: int) -> None:
    """Add a tile's weighted values to o."""
    item = pl_item()
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


def sum_keys(dim: int, rows: int, p: int, kp: int, chunks: int, o: int, state: int) -> None:
    """The same where values are the first `dim` columns of keys."""
    item, steps = pl_item(), pl_latent_steps()
    for v in range(0, dim * item >> 2, steps):
        for r in range(0, rows, pl_latent_rows()):
            some = min(pl_latent_rows(), rows - r)
            pl_latents(
                some * 8 + steps, steps, p + r * KEY_TILE * item, KEY_TILE * item, kp, chunks, v * 64,
                o + (r * dim + v * 4 // item) * 4, dim * 4, state + 16 * r,
            )  # fmt: skip


def op_attend(c: int, row: int, tid: int, ticket: int) -> None:
    # 1 q, 2 ldq, 3 out, 4 ldo, 5 cache, 6 block bytes, 7 bytes from chunk to chunk, 8 block size, 9 heads, 10 kv heads,
    # 11 dim, 12 scale, 13 window, 14 seq_start, 15 seq_len, 16 seq_row, 17 block_table, 18 bytes of its rows,
    # 19 bytes from kv head to kv head, 20 dim of values, 21 are they the first columns of keys
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
        elif code == BY_HEAD:
            op_by_head(c, row, ticket, scratch(c, tid))
        elif code == LATENT:
            n, threads = get(get(c, COUNTS), 0), get(c, THREADS)
            op_latent(c, row, share(n, tid, threads), share(n, tid + 1, threads), scratch(c, tid))
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
        elif code == GROUPED:
            op_grouped(c, row, tid, ticket)
        elif code == ROUTE:
            op_route(c, row, tid)
        elif code == SORT:
            op_sort(c, row, tid)
        elif code == COMBINE:
            op_combine(c, row, tid)
        elif code == GATE:
            op_gate(c, row, tid)
        elif code == SQUARES:
            op_squares(c, row, tid)
        elif code == RESCALE:
            op_rescale(c, row, tid)
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
