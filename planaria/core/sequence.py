"""What a lane keeps of a request, and of the rows that go on together. Plain records: `scheduler.Lane` changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planaria.core.kv_cache import BlockKey
from planaria.core.policy import Key
from planaria.types import Request, TokenLogprobs

if TYPE_CHECKING:
    from planaria.core.transfer import Fetch

NEVER = 1 << 62


class SequenceState:
    """A request as its lane sees it. `row` is None while it waits; `last_step` is the last step planned with it."""

    __slots__ = (
        "auto", "auto_from", "auto_start", "blocks", "end_tick", "fetch", "fetched", "key", "keys", "last_step",
        "leaving", "most", "next_event", "num_cached", "offered", "open", "owned", "planned", "prompt_length",
        "prompt_logprobs", "queued", "quiet_to", "reads", "remembered", "request", "row", "stops", "target", "turn",
    )  # fmt: skip

    def __init__(self, request: Request, key: Key) -> None:
        self.request, self.key = request, key
        self.row: int | None = None
        self.blocks: list[int] = []
        self.keys: list[BlockKey] = []  # of the full blocks of the history, as far as known
        self.remembered = 0  # how many of them the pool has been told
        self.owned: list[BlockKey] = []  # announced as being computed by this one
        self.planned = 0  # cursor after all planned steps, while not `auto`
        self.target = 0  # history length to reach before sampling
        self.auto = False
        self.turn = 0
        self.auto_from = self.auto_start = 0  # first tick by itself, and the cursor it began with
        self.end_tick = self.next_event = NEVER
        self.last_step = 0
        self.open = True  # no final delta yet
        self.leaving = False  # all its steps are planned; row and blocks are in `deferred`
        self.fetch: Fetch | None = None  # that it waits for
        self.fetched = False  # or it has waited for one
        self.num_cached = 0
        self.offered = 0  # blocks of its history, to other servers
        self.queued = 0.0  # seconds before it first had a row
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        params = request.params
        self.reads = params.reads_prompt  # positions of the prompt that steps tell of can't come from KV
        # One with a grammar has its end tokens only where they end it: see `structured.constraint`.
        ends = request.eos_ids if params.grammar or not params.ignore_eos else ()
        self.stops = frozenset(params.stop_token_ids) | frozenset(ends)
        self.prompt_length = len(request.prompt)
        self.quiet_to = 0  # tokens of its output up to which a token that is no stop is only put down
        self.most = 0 if request.lends else request.max_tokens  # tokens of its output, with which it ends here


class MicroStep:
    """The rows of one turn, which go on together. `tick` counts its steps, `last_step`: the last one planned."""

    __slots__ = ("due", "last_step", "num_rows", "tick")

    def __init__(self, last_step: int) -> None:
        self.num_rows = 0  # that go on by themselves
        self.tick = 0
        self.last_step = last_step
        self.due: dict[int, list[SequenceState]] = {}  # tick -> rows that need something then
