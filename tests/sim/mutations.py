"""Mistakes that the simulation must find: each is made for the time of a `with`, in the shipping code or in the hash
model, and comes with the rules one of which it must break.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec

from planaria.core import holding
from planaria.core.engine import EngineCore
from planaria.core.kv_cache import BlockPool
from planaria.core.quarantine import Quarantine
from planaria.core.scheduler import Lane
from planaria.core.sequence import SequenceState
from planaria.executor.health import Health
from planaria.executor.recovery import Reformations
from planaria.executor.reply_ledger import ReplyLedger, Ticket
from planaria.protocol import LaneResult, Reply, StepResult
from planaria.types import Delta
from tests.reference_worker import RowState, Rule, Work, mix
from tests.sim.context_mutations import (
    answer_with_the_last_share,
    compute_the_neighbours_share,
    forget_the_prefill_rank,
    gather_the_last_share_first,
    leave_a_token_to_the_next_share,
    take_the_first_tokens,
)
from tests.sim.fleet_mutations import (
    always_healthy,
    count_no_fault_of_who_leaves,
    dawdle_before_another,
    keep_the_answering_rank,
    leave_them_there,
    lose_a_request_at_a_layout_change,
    mix_up_the_lanes,
    move_with_the_tokens_as_a_prompt,
    never_grow,
    route_to_an_engine_that_left,
    trust_silence,
)
from tests.sim.lane_mutations import (
    believe_that_new_ranks_have_what_lost_ones_had,
    commit_before_all_have_it,
    count_bytes_when_they_are_prepared,
    keep_what_was_prepared_at_a_loss,
    leave_with_the_only_copy,
    load_all_at_once,
    load_where_the_configuration_says,
    overwrite_the_last_copy,
    read_what_is_overwritten,
    rearrange_while_a_resize_runs,
    skip_a_step_with_nothing_to_do,
)
from tests.sim.lora_mutations import (
    believe_that_new_ranks_have_adapters,
    drop_what_is_unloaded,
    enter_before_the_last_part,
    forget_the_adapter,
    give_away_a_slot_in_use,
    leave_the_adapter_out,
    starve_who_waits,
)
from tests.sim.memory_mutations import (
    adopt_the_token_in_flight,
    ask_one_rank,
    believe_what_a_dead_rank_has_left,
    check_what_has_a_key,
    commit_what_one_rank_has,
    count_what_is_planned,
    keep_blocks_of_who_has_ended,
    keep_old_numbers_of_blocks,
    let_go_of_blocks_that_count,
    take_the_first_heads,
    whatever_the_layout,
    write_down_what_is_planned,
)
from tests.sim.process import SimWorker
from tests.sim.restart_mutations import (
    acknowledge_at_once,
    acknowledge_before_the_sync,
    believe_what_could_not_be_synced,
    drop_what_failed,
    end_it_twice,
    forget_what_was_drawn,
    leave_names_unsynced,
    leave_numbers_out_of_what_is_short,
    leave_records_unchecked,
    leave_the_key_out,
    leave_the_torn_tail,
    leave_what_is_half_written,
    remove_before_it_is_replaced,
    tell_before_it_is_written,
    tell_the_last_event_again,
    write_over_what_is_there,
)
from tests.sim.scenario import VOCAB
from tests.sim.seeds import restart, simulate
from tests.sim.tier_mutations import (
    believe_the_first_rank,
    forget_the_interleave,
    leave_the_degree_out,
    leave_the_part_out,
    leave_the_version_out,
    read_no_checksum,
    save_before_the_commit,
    save_what_is_there_now,
    tell_nobody_what_is_dropped,
)
from tests.sim.transfer_mutations import (
    believe_what_was_lent,
    count_answers,
    forget_the_epoch,
    hold_nothing,
    never_release,
    release_twice,
    take_one_rank_for_all,
    take_the_rest_for_granted,
)


@dataclass(frozen=True)
class Mutation:
    name: str
    apply: Callable[[], AbstractContextManager[Any]]
    rules: frozenset[str]  # that may name it
    worker: Any = SimWorker
    keyed: bool = True  # what the model draws depends on the position
    soon: int = 0  # a seed soon after which it is noticed
    restarts: bool = False  # a server's, not its engines'

    def run(self, seed: int) -> None:
        """Raises Violation."""
        if self.restarts:
            restart(seed)
        else:
            simulate(seed, self.worker, keyed=self.keyed)


@contextmanager
def replay_only_the_prompt() -> Iterator[None]:
    lost = Lane.lost

    def forget(self: Lane, step: int, micro_steps: int, **kept: Any) -> None:
        for entry in self.entries.values():
            entry.request.output.clear()
        lost(self, step, micro_steps, **kept)

    with patch.object(Lane, "lost", forget):
        yield


@contextmanager
def keep_block_tables() -> Iterator[None]:
    """What blocks held before the loss is believed to be there still."""
    reset = Lane.reset

    def keep(self: Lane, step: int, pool: BlockPool | None = None) -> None:
        old: BlockPool | None = getattr(self, "pool", None)
        reset(self, step, pool)
        if pool is not None:
            return
        if old is None or old.num_blocks != self.pool.num_blocks:
            return
        for key, block in old.block_of.items():
            self.pool.empty.remove(block)
            self.pool.idle[block] = None
            self.pool.block_of[key], self.pool.key_of[block] = block, key

    with patch.object(Lane, "reset", keep):
        yield


@contextmanager
def accept_a_stale_epoch() -> Iterator[None]:
    """Replies count by their place alone: neither tickets nor results say which epoch they are of."""
    end_epoch, commit = ReplyLedger.end_epoch, EngineCore.commit

    def number_again(self: ReplyLedger, why: str) -> None:
        end_epoch(self, why)
        self.next_number = 0

    def believe(self: EngineCore, result: StepResult) -> list[Delta]:
        return commit(self, StepResult(self.epoch, result.step, result.lanes, result.seconds))

    with patch.object(ReplyLedger, "end_epoch", number_again), patch.object(EngineCore, "commit", believe):
        yield


class Unkeyed(SimWorker):
    """Draws from a stream of its own, not by position."""

    def draw(self, state: RowState, last: int, position: int) -> int:
        return mix(last, state.fresh.seed, position - len(state.fresh.tokens))


class FromTheStart(SimWorker):
    """A grammar begins anew in each row, whatever came out before."""

    def enter(self, state: RowState) -> None:
        super().enter(state)
        if state.at is not None and len(state.tokens) == len(state.fresh.tokens):
            state.at = Rule.START


class Foreign(SimWorker):
    """Every row is held to the grammar of the first row that has one."""

    def rule(self, state: RowState) -> Rule | None:
        rows = (self.books.rows[row].fresh.params.grammar for row in sorted(self.books.rows))
        first = next((grammar for grammar in rows if grammar), "")
        return Rule(first, VOCAB) if first and state.fresh.params.grammar else None


class NeverBack(SimWorker):
    """What was guessed stays in the grammar's state, right or wrong."""

    def draft(self, state: RowState, position: int, most: int) -> list[int]:
        guesses = super().draft(state, position, most)
        for token in guesses[:1]:
            state.at = self.after(state, state.at, token)
        return guesses


class Credulous(SimWorker):
    """Keeps the first guess that was wrong."""

    def _draw_all(self, work: Work, state: RowState) -> list[int]:
        drawn = super()._draw_all(work, state)
        return drawn if len(drawn) < 2 else [*drawn[:-1], (drawn[-1] + 1) % VOCAB]


class Sprawling(SimWorker):
    """Guesses as if every row had one more block."""

    def _draw_all(self, work: Work, state: RowState) -> list[int]:
        return super()._draw_all(work._replace(drafts=state.fresh.drafts), state)


@contextmanager
def forget_what_was_drafted() -> Iterator[None]:
    """A step's result is one token a row."""
    commit = Lane.commit

    def first(self: Lane, step: int, result: LaneResult) -> list[Delta]:
        return commit(self, step, msgspec.structs.replace(result, more={}))

    with patch.object(Lane, "commit", first):
        yield


@contextmanager
def forget_who_is_late() -> Iterator[None]:
    with patch.object(holding, "again", lambda lane, row: None):
        yield


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def drop_a_reply() -> Iterator[None]:
    on_reply, count = ReplyLedger.on_reply, 0

    def drop(self: ReplyLedger, rank: int, number: int, reply: Reply) -> list[Ticket]:
        nonlocal count
        count += 1
        return on_reply(self, rank, number, reply) if count % 40 else []

    with patch.object(ReplyLedger, "on_reply", drop):
        yield


@contextmanager
def sum_from_the_middle() -> Iterator[None]:
    """A text of whose positions all are wanted begins with what is in KV."""
    with patch.object(SequenceState, "__init__", _reads_nothing):
        yield


_begin = SequenceState.__init__


def _reads_nothing(self: SequenceState, *args: Any) -> None:
    _begin(self, *args)
    self.reads = False


@contextmanager
def collect_in_the_midst_of_a_commit() -> Iterator[None]:
    """As it once was: a row whose last token is in this commit is forgotten when another ends first."""
    leave = Lane.leave

    def collect(self: Lane, entry: Any, *, keep_open: bool = False, at_once: bool = False) -> None:
        leave(self, entry, keep_open=keep_open, at_once=at_once)
        if not keep_open:
            self.collect()

    with patch.object(Lane, "leave", collect):
        yield


@contextmanager
def deaf_health() -> Iterator[None]:
    with patch.object(Health, "look", lambda *args: {}):
        yield


@contextmanager
def endless_patience() -> Iterator[None]:
    with patch.object(Reformations, "allowed", lambda *args: True):
        yield


@contextmanager
def convict_at_once() -> Iterator[None]:
    """Whoever was there is guilty."""

    def first(self: Quarantine, present: Any) -> str | None:
        ids = list(present)
        self.faults.update(dict.fromkeys(ids, 1))
        return ids[0] if ids else None

    with patch.object(Quarantine, "fault", first):
        yield


@contextmanager
def leak_a_block() -> Iterator[None]:
    release = BlockPool.release

    def forget_one(self: BlockPool, blocks: Any) -> None:
        release(self, list(blocks)[1:] if len(list(blocks)) > 3 else blocks)

    with patch.object(BlockPool, "release", forget_one):
        yield


WRONG_TOKENS = frozenset({"tokens", "index", "ranks agree", "plan", "only committed"})
MISPLACED = frozenset({"held", "same maps"})
TIER = WRONG_TOKENS | {"same bytes"}
STUCK = frozenset({"ends", "verdict", "health"})
DURABLE = frozenset({"durable", "leaks"})
MUTATIONS = [
    Mutation("replay only the prompt", replay_only_the_prompt, WRONG_TOKENS),
    Mutation("keep block tables after a loss", keep_block_tables, WRONG_TOKENS),
    Mutation("accept a stale epoch", accept_a_stale_epoch, WRONG_TOKENS | {"epoch", "crash", "verdict"}, soon=320),
    Mutation("draw without the position key", nothing, WRONG_TOKENS, Unkeyed, keyed=False),
    Mutation("begin a grammar anew in each row", nothing, WRONG_TOKENS, FromTheStart),
    Mutation("hold a row to the grammar of another", nothing, WRONG_TOKENS, Foreign),
    Mutation("leave guesses in a grammar's state", nothing, WRONG_TOKENS, NeverBack),
    Mutation("forget a row that is late", forget_who_is_late, STUCK),
    Mutation("keep a wrong guess", nothing, WRONG_TOKENS, Credulous),
    Mutation("guess beyond the blocks", nothing, WRONG_TOKENS | {"crash"}, Sprawling),
    Mutation("forget what was drafted", forget_what_was_drafted, WRONG_TOKENS | {"ends"}),
    Mutation("sum from the middle", sum_from_the_middle, frozenset({"vector"}), soon=45),
    Mutation("drop a reply", drop_a_reply, frozenset({"verdict", "ends"})),
    Mutation("collect in the midst of a commit", collect_in_the_midst_of_a_commit, STUCK, soon=465),
    Mutation("deaf health", deaf_health, frozenset({"detect"})),
    Mutation("endless patience", endless_patience, frozenset({"gives up", "ends"}), soon=124),
    Mutation("convict at once", convict_at_once, frozenset({"poison"})),
    Mutation("leak a block", leak_a_block, frozenset({"leaks", "ends"})),
    Mutation("keep the old layout's answering rank", keep_the_answering_rank, frozenset({"crash", "ends", "once"})),
    Mutation("lose a request at a layout change", lose_a_request_at_a_layout_change, frozenset({"once"})),
    Mutation("mix up the lanes", mix_up_the_lanes, WRONG_TOKENS | {"once", "ends", "crash", "leaks"}),
    Mutation("never grow", never_grow, frozenset({"layout"})),
    Mutation("route to an engine that left", route_to_an_engine_that_left, frozenset({"route"}), soon=19),
    Mutation(
        "move a request with its tokens as a prompt", move_with_the_tokens_as_a_prompt, frozenset({"tokens", "index"})
    ),
    Mutation("leave requests where they are", leave_them_there, frozenset({"route", "errors"}), soon=19),
    Mutation("always healthy", always_healthy, frozenset({"health"}), soon=19),
    Mutation("dawdle before another", dawdle_before_another, frozenset({"follows", "ends"})),
    Mutation("count no fault of who leaves", count_no_fault_of_who_leaves, frozenset({"health"}), soon=151),
    Mutation("trust silence", trust_silence, frozenset({"detect"}), soon=560),
    Mutation("skip a step with nothing to do", skip_a_step_with_nothing_to_do, frozenset({"deadlock"})),
    Mutation("commit before all have it", commit_before_all_have_it, frozenset({"prepared"})),
    Mutation("keep what was prepared at a loss", keep_what_was_prepared_at_a_loss, frozenset({"prepared", "deadlock"})),
    Mutation("load all at once", load_all_at_once, frozenset({"turns"})),
    Mutation("load where the configuration says", load_where_the_configuration_says, MISPLACED | {"weights"}),
    Mutation("rearrange while a resize runs", rearrange_while_a_resize_runs, MISPLACED | {"crash", "deadlock"}),
    Mutation("leave with the only copy", leave_with_the_only_copy, frozenset({"weights"}), soon=30),
    Mutation("overwrite the last copy", overwrite_the_last_copy, MISPLACED | {"crash"}),
    Mutation("read what is overwritten", read_what_is_overwritten, frozenset({"held", "bytes"}), soon=96),
    Mutation(
        "believe that new ranks have what lost ones had",
        believe_that_new_ranks_have_what_lost_ones_had,
        frozenset({"held", "weights"}),
        soon=29,
    ),
    Mutation("count what is planned as committed", count_what_is_planned, WRONG_TOKENS, soon=96),
    Mutation("ask one rank what all have", ask_one_rank, WRONG_TOKENS, soon=25),
    Mutation("keep KV of another layout", whatever_the_layout, WRONG_TOKENS | {"crash"}),
    Mutation("commit what one rank has", commit_what_one_rank_has, WRONG_TOKENS | {"crash", "ends"}),
    Mutation("let go of blocks that count", let_go_of_blocks_that_count, WRONG_TOKENS | {"crash", "leaks"}),
    Mutation("adopt the token in flight", adopt_the_token_in_flight, WRONG_TOKENS, soon=1195),
    Mutation("believe what a dead rank has left", believe_what_a_dead_rank_has_left, WRONG_TOKENS, soon=626),
    Mutation("check what has a key", check_what_has_a_key, WRONG_TOKENS, soon=932),
    Mutation("take the first heads of another layout", take_the_first_heads, WRONG_TOKENS, soon=230),
    Mutation("keep numbers of blocks in another layout", keep_old_numbers_of_blocks, WRONG_TOKENS, soon=106),
    Mutation("take the first tokens of another layout", take_the_first_tokens, WRONG_TOKENS, soon=290),
    Mutation("compute the neighbour's share", compute_the_neighbours_share, WRONG_TOKENS),
    Mutation("gather the last share first", gather_the_last_share_first, WRONG_TOKENS),
    Mutation("leave a token to the next share", leave_a_token_to_the_next_share, WRONG_TOKENS),
    Mutation("answer with the last share", answer_with_the_last_share, WRONG_TOKENS | {"ends", "crash"}, soon=44),
    Mutation("forget the prefill rank", forget_the_prefill_rank, WRONG_TOKENS | {"crash"}),
    Mutation("write down what is planned", write_down_what_is_planned, WRONG_TOKENS, soon=771),
    Mutation("keep blocks of who has ended", keep_blocks_of_who_has_ended, frozenset({"leaks", "ends"}), soon=18),
    Mutation("read no checksum", read_no_checksum, TIER, soon=100),
    Mutation("leave the version out of the key", leave_the_version_out, TIER),
    Mutation("leave the part out of the identity", leave_the_part_out, TIER),
    Mutation("leave the degree out of the identity", leave_the_degree_out, TIER),
    Mutation("forget the interleave", forget_the_interleave, TIER),
    Mutation("believe the first rank", believe_the_first_rank, TIER, soon=16),
    Mutation("save before the commit", save_before_the_commit, TIER),
    Mutation("save what is there now", save_what_is_there_now, TIER, soon=22),
    Mutation("tell nobody what is dropped", tell_nobody_what_is_dropped, TIER | {"plan"}, soon=124),
    Mutation("count answers of ranks", count_answers, WRONG_TOKENS, soon=63),
    Mutation("never release", never_release, frozenset({"leaks", "ends"}), soon=59),
    Mutation("release twice", release_twice, WRONG_TOKENS | {"leaks", "crash", "ends"}, soon=799),
    Mutation("hold nothing", hold_nothing, WRONG_TOKENS | {"leaks", "crash", "ends"}, soon=59),
    Mutation("believe what was lent", believe_what_was_lent, WRONG_TOKENS, soon=699),
    Mutation("take the rest for granted", take_the_rest_for_granted, WRONG_TOKENS, soon=53),
    Mutation("take one rank for all", take_one_rank_for_all, WRONG_TOKENS, soon=16),
    Mutation("forget the epoch", forget_the_epoch, WRONG_TOKENS, soon=690),
    Mutation("leave the adapter out of the key", leave_the_adapter_out, TIER),
    Mutation("give away a slot in use", give_away_a_slot_in_use, WRONG_TOKENS, soon=105),
    Mutation("believe that new ranks have adapters", believe_that_new_ranks_have_adapters, frozenset({"plan"})),
    Mutation("enter before the last part", enter_before_the_last_part, frozenset({"plan", "crash"}), soon=21),
    Mutation("drop what is unloaded", drop_what_is_unloaded, frozenset({"crash"})),
    Mutation("give nobody a slot", starve_who_waits, frozenset({"ends"}), soon=28),
    Mutation("forget the adapter", forget_the_adapter, WRONG_TOKENS | {"leaks"}),
    Mutation("count bytes when they are prepared", count_bytes_when_they_are_prepared, frozenset({"bytes"})),
    Mutation("acknowledge before the sync", acknowledge_before_the_sync, DURABLE, restarts=True, soon=61),
    Mutation("acknowledge at once", acknowledge_at_once, DURABLE, restarts=True),
    Mutation("leave names unsynced", leave_names_unsynced, DURABLE, restarts=True),
    Mutation("believe what could not be synced", believe_what_could_not_be_synced, DURABLE, restarts=True, soon=194),
    Mutation("write over what is there", write_over_what_is_there, DURABLE, restarts=True, soon=51),
    Mutation("remove before it is replaced", remove_before_it_is_replaced, DURABLE, restarts=True),
    Mutation("leave what is half written", leave_what_is_half_written, DURABLE, restarts=True, soon=515),
    Mutation("leave the torn tail", leave_the_torn_tail, DURABLE, restarts=True, soon=29),
    Mutation("leave records unchecked", leave_records_unchecked, DURABLE, restarts=True, soon=31),
    Mutation("tell before it is written", tell_before_it_is_written, DURABLE, restarts=True),
    Mutation("leave numbers out of what is short", leave_numbers_out_of_what_is_short, DURABLE, restarts=True),
    Mutation("forget what was drawn", forget_what_was_drawn, DURABLE, restarts=True),
    Mutation("end it twice", end_it_twice, DURABLE, restarts=True, soon=26),
    Mutation("drop what failed", drop_what_failed, DURABLE | {"ends"}, restarts=True),
    Mutation("tell the last event again", tell_the_last_event_again, DURABLE, restarts=True),
    Mutation("leave the key out", leave_the_key_out, DURABLE, restarts=True),
]
