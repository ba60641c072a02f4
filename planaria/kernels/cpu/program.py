"""The interpreter of a tape: which thread does what, in what order. The arithmetic is in the kernels it calls.

Written in the integer Python that compiler.py turns into machine code. Addresses and sizes are int64. `c` is the
address of the control block, `row` of the tape row being run. Every thread runs `execute`; a barrier ends each
operation. Nothing here allocates, fails or touches Python.
The rule: how work is cut depends on row counts only where the result does not (see micro.py).
"""

from __future__ import annotations

from planaria.kernels.cpu import fields, layout, native, packed
from planaria.kernels.cpu.micro import STORE_F32
from planaria.kernels.cpu.native import (
    TARGET,
    atomic_add,
    atomic_get,
    get,
    get32,
    invoke,
    operate,
    prefetch,
    put,
    put32,
    relax,
)
from planaria.kernels.cpu.products import tall, tiles
from planaria.kernels.cpu.striped import held
from planaria.kernels.cpu.threads import (
    barrier,
    bring,
    clear,
    keep_to,
    rows_from,
    scratch,
    sleep_while,
    wake_all,
    whole_chunks,
)

# Operations


def op_embed(c: int, row: fields.EmbedOp, tid: int) -> None:
    for t in range(rows_from(c, layout.ROWS_TOKENS, tid), rows_from(c, layout.ROWS_TOKENS, tid + 1)):
        token = get32(row.tokens, t) - row.first
        if token < 0 or token >= row.rows:
            if row.partial:
                clear(c, row.out + t * row.ldo, row.ldo)
                continue
            token = 0  # callers check; this only keeps a mistake from reading foreign memory
        panel = row.w + (token >> 4) * row.stride
        if row.kernels:
            invoke(
                get(row.kernels, packed.EMBED), panel, panel + row.scales, token & 15, row.length, row.out + t * row.ldo
            )  # fmt: skip
        else:
            native.embed(panel, token & 15, row.length, row.out + t * row.ldo)
        if row.factor:
            native.scale(row.out + t * row.ldo, row.ldo >> 2, row.factor)


def op_norm(c: int, row: fields.NormOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        x, out = row.x + r * row.ldx, row.out + r * row.ldo
        bring(x + row.ldx, row.ldx)
        if row.narrow:
            native.rotate(x, out, scratch(c, tid) + layout.BIG, 0, 0, 0, row.count, row.weight, row.eps)
        else:
            native.norm(x, row.weight, out, row.padded, row.count, row.eps)


def op_gated(c: int, row: fields.GatedOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        x, half = row.x + r * row.ldx, row.half
        native.gated(row.act, x, x + half * TARGET.item, row.out + r * row.ldo, half, row.padded)


def op_gelu(c: int, row: fields.GeluOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        native.gelu(row.x + r * row.ldx, row.padded)


def op_clip(c: int, row: fields.ClipOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        native.clip(row.x + r * row.ldx, row.padded, row.limit)


def op_cap(c: int, row: fields.CapOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        native.cap(row.x + r * row.ldx, row.padded, row.inner, row.outer)


def op_layer_norm(c: int, row: fields.LayerNormOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        x, out = row.x + r * row.ldx, row.out + r * row.ldo
        bring(x + row.ldx, row.ldx)
        native.layer_norm(x, row.weight, row.bias, out, row.padded, row.count, row.eps)


def op_add_norm(c: int, row: fields.AddNormOp, tid: int) -> None:
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        x, target = row.x + r * row.ldx, row.target + r * row.ldt
        bring(x + row.ldx, row.ldx)
        native.add_norm(x, row.weight, target, row.padded, row.count, row.eps)


def op_take(c: int, row: fields.TakeOp, tid: int) -> None:
    counts = get(c, layout.COUNTS)
    first, tokens = get(counts, layout.FIRST), get(counts, layout.ROWS_TOKENS)
    for r in range(rows_from(c, row.rows, tid), rows_from(c, row.rows, tid + 1)):
        t = get32(row.index, r) - first
        if t >= 0 and t < tokens:
            native.copy(row.out + r * row.ld, row.x + t * row.ld, row.ld)


def op_rope(c: int, row: fields.RopeOp, tid: int) -> None:
    n, slots = get(get(c, layout.COUNTS), row.rows), row.slots
    start = whole_chunks(slots, rows_from(c, row.rows, tid), n)
    end = whole_chunks(slots, rows_from(c, row.rows, tid + 1), n)
    dim, heads, kv_heads, half = row.dim, row.heads, row.kv_heads, row.half
    head = dim * TARGET.item
    temp = scratch(c, tid) + layout.TEMP
    size, chunk = row.block_size, 16 * head
    per_head = (size >> 4) * 2 * chunk
    eps = row.eps
    for t in range(start, end):
        x = row.x + t * row.ldx
        q = row.out + t * row.ldo
        position = get32(row.positions, t)
        cos, sin = (row.cos + position * half * 4, row.sin + position * half * 4)
        bring(x + row.ldx, row.ldx)
        for h in range(heads):
            native.rotate(x + h * head, q + h * head, temp, cos, sin, half, dim, row.q_norm, eps)
        slot = get(slots, t)
        if slot < 0:
            continue
        offset = slot % size
        place = row.cache + (slot // size) * row.block_bytes + (offset >> 4) * 2 * chunk
        token = offset & 15
        for h in range(kv_heads):
            k = x + (heads + h) * head
            native.rotate(k, temp + 2048, temp, cos, sin, half, dim, row.k_norm, eps)
            native.store_key(temp + 2048, place + h * per_head + token * 4, head >> 2)
            v = x + (heads + kv_heads + h) * head
            native.store_value(v, place + chunk + h * per_head, token, dim)


def attend_tile(c: int, row: fields.AttendOp, mine: int, s: int, h: int, first: int, count: int) -> None:
    """Tokens [first, first + count) of sequence s, for the query heads of key head h."""
    item, wide = TARGET.item, layout.KEY_TILE * TARGET.row_item
    size, dim = row.block_size, row.value_dim  # of values
    group = row.heads // row.groups
    head = row.dim * item
    rows = count * group
    begin = get32(row.seq_start, s)
    new = get32(row.seq_start, s + 1) - begin
    position = get32(row.seq_len, s) - new + first  # of token `first`
    window, stripes = row.window, row.stripes
    keys = held(stripes, position + count)  # that the last token sees
    table = row.table + get32(row.seq_row, s) * row.ld_table
    chunk, both = 16 * head, row.chunk_bytes
    base = row.cache + h * row.group_bytes
    tall = max(rows, layout.QUERY_ROWS)
    q = mine + layout.BIG
    scores = q + tall * row.dim * TARGET.row_item
    p = scores + tall * layout.KEY_TILE * 4
    o = p + tall * wide
    kp, vp = mine + layout.POINTERS, mine + layout.POINTERS + 1024
    state = mine + layout.STATE
    for i in range(count):
        source = row.q + (begin + first + i) * row.ldq + h * group * head
        if TARGET.widens:
            native.widen(source, q + i * group * row.dim * 4, group * row.dim)
        else:
            native.copy(q + i * group * head, source, group * head)
    for r in range(rows):
        put32(state, 4 * r, -246811958)  # float32 bits of LOWEST
        put32(state, 4 * r + 1, 0)
        if row.sinks:  # as a key seen before all others, whose value is 0
            put32(state, 4 * r, get32(row.sinks, h * group + r % group))
            put32(state, 4 * r + 1, layout.ONE)
    for i in range(rows * dim // 2):
        put(o, i, 0)
    start = 0
    if window > 0:
        start = held(stripes, max(0, position - window + 1)) // layout.KEY_TILE * layout.KEY_TILE
    while start < keys:
        chunks = (min(layout.KEY_TILE, keys - start) + 15) >> 4
        for i in range(chunks):
            key = start + 16 * i
            place = base + get32(table, key // size) * row.block_bytes + ((key % size) >> 4) * both
            put(kp, i, place)
            put(vp, i, place + chunk)
            for line in range(place, place + both, 256):
                prefetch(line)  # one in four: the core fetches their neighbours by itself
        put(mine + layout.PLAN, 0, scores)  # tiles of widened rows ask for memory from there: for none but this line
        put(mine + layout.PLAN, 1, 0)
        tiles(
            c, rows, q, row.dim * TARGET.row_item, head >> 2, kp, chunks, TARGET.tile_panels, scores,
            layout.KEY_TILE * 4, STORE_F32, mine + layout.PLAN,
        )  # fmt: skip
        for i in range(count):
            at = position + i
            lo = 0
            if window > 0:
                lo = max(0, held(stripes, max(0, at - window + 1)) - start)
            hi = min(held(stripes, at + 1) - start, chunks * 16)
            for g in range(group):
                r = i * group + g
                if row.cap:
                    native.cap(scores + r * layout.KEY_TILE * 4, chunks * 16, row.cap, layout.ONE)
                native.softmax(
                    scores + r * layout.KEY_TILE * 4, p + r * wide, chunks * 16, lo, hi, row.scale, state + 16 * r
                )  # fmt: skip
        if row.keys_are_values:
            sum_keys(dim, rows, p, kp, chunks, o, state)
        else:
            sum_values(dim, rows, p, vp, chunks, o, state)
        start += layout.KEY_TILE
    for i in range(count):
        line = row.out + (begin + first + i) * row.ldo
        for g in range(group):
            r, n = i * group + g, h * group + g
            if stripes:
                place = line + n * (dim + layout.PART_STATE) * 4
                native.copy(place, o + r * dim * 4, dim * 4)
                native.copy(place + dim * 4, state + 16 * r, 16)
            else:
                native.divide(o + r * dim * 4, state + 16 * r, line + n * dim * item, dim)


def sum_values(dim: int, rows: int, p: int, vp: int, chunks: int, o: int, state: int) -> None:
    """Add a tile's weighted values to o."""
    item, wide = TARGET.item, layout.KEY_TILE * TARGET.row_item
    v, all_panels = 0, dim >> 4
    while v < all_panels:
        panels = TARGET.value_panels if all_panels - v >= TARGET.value_panels else 1
        r = 0
        while r < rows:
            some, skip = min(TARGET.value_rows, rows - r), 0
            if TARGET.tiled:  # as `tiles` has it configured
                some = tall(rows)
                skip = max(0, r + some - rows)
                r -= skip
            native.values(
                (skip * 32 + some) * 8 + panels, panels, p + r * wide, wide, vp, chunks,
                v * 256 * item, o + (r * dim + 16 * v) * 4, dim * 4, state + 16 * r,
            )  # fmt: skip
            r += some
        v += panels


def sum_keys(dim: int, rows: int, p: int, kp: int, chunks: int, o: int, state: int) -> None:
    """The same where values are the first `dim` columns of keys."""
    item, steps, wide = TARGET.item, TARGET.latent_steps, layout.KEY_TILE * TARGET.row_item
    for v in range(0, dim * item >> 2, steps):
        for r in range(0, rows, TARGET.latent_rows):
            some = min(TARGET.latent_rows, rows - r)
            native.latents(
                some * 8 + steps, steps, p + r * wide, wide, kp, chunks, v * 64,
                o + (r * dim + v * 4 // item) * 4, dim * 4, state + 16 * r,
            )  # fmt: skip


def op_attend(c: int, row: fields.AttendOp, tid: int, ticket: int) -> None:
    sequences, kv_heads = get(get(c, layout.COUNTS), layout.SEQUENCES), row.groups
    group = row.heads // kv_heads
    most = max(1, layout.QUERY_ROWS // group)
    # drafts of one sequence, say: in so many parts, else threads wait for the one that has a key head more
    units = max(1, sequences * kv_heads)
    parts = (2 * get(c, layout.THREADS) + units - 1) // units
    mine = scratch(c, tid)
    put(mine + layout.CURSOR, 0, tid)
    put(mine + layout.CURSOR, 1, 0)
    put(mine + layout.CURSOR, 2, 0)
    s, passed = 0, 0  # units of the sequences before s
    unit = atomic_add(ticket, 0, 1)
    while s < sequences:
        new = get32(row.seq_start, s + 1) - get32(row.seq_start, s)
        tokens = min(most, max(1, (new + parts - 1) // parts))
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
    tape, tickets = get(c, layout.TAPE), get(c, layout.TICKETS)
    for i in range(get(c, layout.OPS)):
        if atomic_get(c, layout.OVER) == 0:
            operate(c, tape + i * fields.ROW_WORDS * 8, tid, tickets + i * layout.TICKET_BYTES)
        barrier(c)
    native.configure(0)


def lead(c: int, tid: int) -> None:
    """Run the tape once, as thread 0."""
    tickets = get(c, layout.TICKETS)
    for i in range(get(c, layout.OPS)):
        put(tickets + i * layout.TICKET_BYTES, 0, 0)
        put(tickets + i * layout.TICKET_BYTES, 8, 0)
    put(c, layout.OVER, 0)
    atomic_add(c, layout.GENERATION, 1)
    if atomic_get(c, layout.IDLE) > 0:
        wake_all(c + layout.GENERATION * 8)
    keep_to(c, tid)
    execute(c, tid)
    keep_to(c, get(c, layout.THREADS))


def follow(c: int, tid: int) -> None:
    """Wait for runs and take part in them, until stopped."""
    seen = 0
    keep_to(c, tid)
    while True:
        spins = get(c, layout.IDLE_SPIN)
        while atomic_get(c, layout.GENERATION) == seen:
            if spins > 0:
                spins -= 1
                relax()
            else:
                atomic_add(c, layout.IDLE, 1)
                sleep_while(c + layout.GENERATION * 8, seen)
                atomic_add(c, layout.IDLE, -1)
        seen += 1
        if atomic_get(c, layout.STOP):
            return
        execute(c, tid)


def entry(c: int, tid: int) -> None:
    """What Python calls: thread 0 runs the tape and returns, the others stay until the team is stopped."""
    if tid == 0:
        lead(c, tid)
    else:
        follow(c, tid)
