"""Where the interpreter (program.py) and the recorder (ops.py) find things: numbers both sides agree on."""

from __future__ import annotations

# Words (int64) of the team's control block. Those that several threads write have a cache line of their own.
GENERATION, STOP = 0, 1
ARRIVED = 8
PHASE = 16
SLEEPING = 24
IDLE = 32
(TAPE, OPS, THREADS, SCRATCH, SCRATCH_BYTES, TICKETS, SPIN, COUNTS, ZEROS, IDLE_SPIN, OVER) = range(40, 51)
CORES, CORES_BYTES = 51, 52  # where sets of cores are, a bit for each: of each thread, then of all; 0: anywhere
CONTROL_WORDS = 64

# Words of Batch.counts: the numbers of rows of each kind, and of sequences. ROWS_ALL: the tokens of all lanes;
# ROWS_STEP, STEP_SAMPLES: of the whole step, where this rank has a share of its tokens, from number FIRST on
ROWS_TOKENS, SEQUENCES, ROWS_SAMPLES, ROWS_ALL, ROWS_STEP, STEP_SAMPLES, FIRST = range(7)
TICKET_BYTES = 128  # two counters for each operation, a cache line each

# A rank's port (int64 words): where the memory it shares with other ranks is, and how it waits (collective.py)
PORT_SEGMENT, PORT_RANK, PORT_SIZE, PORT_LANES, PORT_SPIN, PORT_DEADLINE, PORT_FAILED = range(7)
PORT_SLOTS, PORT_SLOT, PORT_CHANNELS, PORT_RING = range(7, 11)  # address, bytes; address, slots of a ring
PORT_NAP = 12  # seconds, nanoseconds: longest sleep before a look around
PORT_CLOCKS = 16  # seconds, nanoseconds of each lane
MAX_LANES, MAX_RANKS = 64, 256
PORT_WORDS = PORT_CLOCKS + 2 * MAX_LANES
# The shared segment, byte offsets: the fence word (0, or 1 + a rank), process ids, then flags
PIDS, FLAGS, FLAG_BYTES, CHANNEL_BYTES = 64, 4096, 128, 256
SUM_PIECE = 4096  # bytes added up at a time, so that they stay in the nearest cache

# A thread's scratch memory, byte offsets
POINTERS = 0  # addresses of chunks: keys, then values
MOST_POINTERS = 240
PLAN = POINTERS + 8 * MOST_POINTERS  # addresses and lengths of what a tile asks for: the next panels, keys and values
CURSOR = 1984  # how far keys and values were asked for: sequence, block, line
STATE = 2048  # float32 [rows][4] of a softmax
TEMP = STATE + 16 * 512  # one head in float32, twice
BIG = TEMP + 4096  # what the operation wants; for packed weights and many rows:
ROW_BLOCK = 128  # rows for which a block of packed codes is unpacked once
ACC = BIG  # totals of up to ROW_BLOCK rows of 3 panels, and twofold.py's integers of one
CODES = ACC + ROW_BLOCK * (3 * 64 + 128)  # where registers don't hold them: a block, or two, unpacked, and factors
FETCH = CODES + 2048  # what to ask for with each tile of each block

ZERO_BYTES = 1024  # of the zeros that ZEROS points to
WHOLE_ROWS = 64  # rows up to which a panel is taken over all rows at once
STREAM_ROWS = 8  # rows up to which a dense weight is read panel after panel, in one stream
FUSED_PANELS = 12  # panels of gate and of up taken at a time; a multiple of a tile's
FORESIGHT_BYTES = 12 << 20  # of weights between an operation and the attention whose keys it asks for
KEY_TILE = 384  # keys of one softmax tile, at fixed positions; a multiple of 48
PIECE_ROWS = 32  # rows of one adapter that are done together
QUERY_ROWS = 96  # rows (tokens x heads of a group) of one attention tile
MAX_GROUP = 512  # query heads that may share a key head
ONE = 1065353216  # float32 bits of 1
PART_STATE = 16  # float32 behind a head's part of attention: the state of its softmax, padded
