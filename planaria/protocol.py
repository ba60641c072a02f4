"""The waist: what the deciding column says to the computing column, and what it hears back.

Frozen msgspec structs, nothing else. A `StepPlan` carries changes only. A row that sampled a token in the
last step of its turn and is named in no later plan goes on by one token by itself (its last sampled token is row state
on the worker); plans and workers check each other by `step`, which counts up by one within an epoch.

A row with `drafts` may go on by more: the worker puts tokens it guesses after the row's last one, draws at each of
these positions as without guesses, and keeps what it drew up to the first that was guessed wrong. It guesses as many as
it likes, none is fine, but never beyond the row's blocks, and a row whose blocks are full does nothing. What refused
guesses left in blocks lies after the row's position and is written over.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import msgspec

from planaria.topology.experts import Maps, Move
from planaria.topology.layout import Layout
from planaria.types import KVLease, KVOffer, SamplingParams, TokenLogprobs

# Token ids, array("i"). A prompt is the one thing here that is long: as an array it travels as its bytes, where a tuple
# would be made of one object per token on every rank. Nobody changes one that is in a message.
if TYPE_CHECKING:
    Tokens = array[int]
else:
    Tokens = array


class Fresh(msgspec.Struct, frozen=True, array_like=True):
    """A request (re)entering a row: first run, resume and recovery are the same thing."""

    tokens: Tokens  # the whole history: prompt, then what was already generated
    num_prompt: int
    params: SamplingParams
    seed: int
    eos_ids: tuple[int, ...] = ()  # min_tokens keeps these from being sampled
    drafts: int = 0  # tokens the worker may guess after the row's last one, in a step the row goes on by itself
    adapter: str = ""  # digest of the adapter it is computed with; empty: none


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One row's change. `count` tokens from history position `start`; `blocks` are appended to its block table.

    `sample`: draw a token after the last of them; from the next step on the row then advances by itself. `start` -1:
    the row goes on from where it is, which only the worker knows where it may draft.
    """

    row: int
    start: int
    count: int
    blocks: tuple[int, ...]
    sample: bool
    fresh: Fresh | None = None


LanePlan = tuple[Row, ...]


class KVLoad(msgspec.Struct, frozen=True, array_like=True):
    """Bring back what is stored under `keys[i]` into `blocks[i]`, from the first on up to the first that isn't there.
    `number`: of the load, in this epoch. `lease`: it is in `lease.blocks[i]` of another engine, if that block still has
    the key, or a server offers it, in blocks that may have another number of tokens than these; else it is in this
    engine's own stores. `first`: the place of the first of `blocks` in the history. `wait`: seconds that another server
    may wait for a block before it says that there is none."""

    number: int
    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    lease: KVLease | KVOffer | None = None
    first: int = 0
    wait: float = 0.0


class KVWork(msgspec.Struct, frozen=True, array_like=True):
    """What each rank of a lane does for its connector before it computes the step, in this order. `dropped`: loads that
    nobody waits for any more, whose blocks are another's from this step on. `saves`: (key, block), of blocks that were
    committed and are as they were until this step computes. `waits`: there is nothing to compute, so wait a moment for
    news. `offers`: (lease, key, block), as saves, for other servers to fetch."""

    dropped: tuple[int, ...] = ()
    loads: tuple[KVLoad, ...] = ()
    saves: tuple[tuple[bytes, int], ...] = ()
    waits: bool = False
    offers: tuple[tuple[str, bytes, int], ...] = ()


class StoreNews(msgspec.Struct, frozen=True, array_like=True):
    """Of one store of a rank, in its parts of blocks: `there` now; `saved` and `loaded` since it last said so, and
    `errors`, by kind. `why`: nothing is saved in it now, in words."""

    there: int = 0
    saved: int = 0
    loaded: int = 0
    errors: dict[str, int] = {}
    why: str = ""


class KVNews(msgspec.Struct, frozen=True, array_like=True):
    """What a rank's connector has done since it last said so. Every load that isn't dropped ends in `loaded` (number,
    blocks from the first on that are there whole, seconds), every save in `stored` or in `refused`. `gone`: keys that
    can't be brought back any more; `stores`: of those that have anything to say, by name; `failed`: of loads from
    other engines that ended early, why, in a word."""

    loaded: tuple[tuple[int, int, float], ...] = ()
    stored: tuple[bytes, ...] = ()
    refused: tuple[bytes, ...] = ()
    gone: tuple[bytes, ...] = ()
    stores: dict[str, StoreNews] = {}
    failed: dict[int, str] = {}


class StepPlan(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """One step of every lane, also of those that have nothing to do: the ranks of all lanes carry it out together, each
    its own lane's part. `freed_rows[lane]` are rows that stop before this step.

    `turn`: a row that draws in a step is of its turn, and goes on by itself in the later steps of that turn. Steps of
    several turns are in flight in a pipeline. `kv`: of each lane, or nothing at all.
    """

    epoch: int
    step: int
    lanes: tuple[LanePlan, ...]
    freed_rows: tuple[tuple[int, ...], ...]
    turn: int = 0
    kv: tuple[KVWork, ...] = ()


class LaneResult(msgspec.Struct, frozen=True, array_like=True):
    """What one lane sampled: `rows[i]` drew `tokens[i]`. The maps are by row and present only where asked for."""

    rows: list[int]
    tokens: list[int]
    logprobs: dict[int, list[TokenLogprobs]] = {}  # of each token the row drew
    prompt_logprobs: dict[int, list[TokenLogprobs]] = {}  # of the positions after `start` of this step's chunk
    errors: dict[int, str] = {}  # rows that failed by themselves; only that request ends
    more: dict[int, list[int]] = {}  # of rows that drew several: the tokens after the first, each as if drawn alone
    late: tuple[int, ...] = ()  # rows that could not draw yet, nor will until their request enters again
    drafted: dict[int, int] = {}  # of rows that had drafts in this step: how many
    pooled: dict[int, bytes] = {}  # of rows that draw no token but end with a vector: that, float32


class StepResult(msgspec.Struct, frozen=True, array_like=True, tag="step_result"):
    """`lanes`: of a rank, its own lane's part alone; for the core, the parts of all lanes. `prepared`: the last version
    whose experts this rank has all received (see SendExperts), 0 in a new epoch. `kv`: of its connector, if there is
    any."""

    epoch: int
    step: int
    lanes: tuple[LaneResult, ...]
    seconds: float = 0.0  # time the worker spent on it
    prepared: int = 0
    kv: KVNews | None = None


# Commands and replies. Every rank answers every command.


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """Say who you are and what you bring to the groups of `epoch`, in this layout.

    `apart`: ranks are on several nodes, so some groups can't share memory.
    """

    epoch: int
    layout: Layout
    apart: bool = False


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """Answer to Join. `segments[axis]`: (descriptor, inode) of a memory file of process `pid`, from the first rank of
    a group along that axis; ranks with the same `home` can open it. `store`: where rank 0 hosts the store that groups
    across nodes meet at. `door`: a port that accepts connections, for checking who reaches whom. `experts`: of each
    layer with experts that this rank has a part in, (its number among them, experts in this rank's memory). `device`:
    that it computes on, as its node numbers them; -1: cores.
    """

    rank: int
    pid: int
    home: str
    node: str
    address: str
    versions: dict[str, str] = {}
    hashes: dict[str, str] = {}
    segments: dict[str, tuple[int, int]] = {}
    store: tuple[str, int] | None = None
    door: int = 0
    experts: tuple[tuple[int, tuple[int, ...]], ...] = ()
    kv: tuple[int, ...] = ()  # numbers of KV that outlived the rank before it, or its own epoch
    digest: str = ""  # of the configuration, joined with the layout in force; `hashes` tell by which field two differ
    device: int = -1


class Regroup(msgspec.Struct, frozen=True, array_like=True, tag="regroup"):
    """Make the groups of `epoch` with these ranks, in rank order. Everybody has joined it.

    `deadline`: seconds that a rank waits for another inside a step before it gives up; the driver usually knows sooner.
    `keeps_kv`: what was committed is still there on all ranks; otherwise all let go of their KV.
    """

    epoch: int
    layout: Layout
    members: tuple[Hello, ...]
    deadline: float = 60.0
    keeps_kv: bool = False


class Load(msgspec.Struct, frozen=True, array_like=True, tag="load"):
    """Read the weights. `ranks`: only these; empty: all. The others answer at once. `maps`: where experts go; empty: as
    the configuration places them. `moves`: experts that come from the memory of others, so are not read: a SendExperts
    of these moves follows, and a PlaceExperts.
    """

    ranks: tuple[int, ...] = ()
    maps: Maps = ()
    moves: tuple[Move, ...] = ()


class SendExperts(msgspec.Struct, frozen=True, array_like=True, tag="send_experts"):
    """Receive into memory aside the experts that `moves` send; nothing in use changes. All ranks take part.

    `aside`: answered at once, and the exchange goes on beside steps, which tell of its end (`StepResult.prepared`); a
    failure of it is the answer to a later command. Otherwise answered when it is done. With no moves, for a version
    that is on its way: answered when that is there. Versions count up from 1 in an epoch; 0 while ranks come up.
    """

    version: int
    moves: tuple[Move, ...]
    aside: bool = False


class PlaceExperts(msgspec.Struct, frozen=True, array_like=True, tag="place_experts"):
    """Between two steps: what was prepared as `version` goes into its slots, and these maps are in force. `maps`: of
    the layers that change, (number among the layers with experts, expert of each slot)."""

    version: int
    maps: tuple[tuple[int, tuple[int, ...]], ...]


class LoraModule(msgspec.Struct, frozen=True, array_like=True):
    """Of an adapter: what is added to one matrix [N, K] of the model, scaling * B A. `a`, `b`: bytes of A [rank, K] and
    B [N, rank]; dtype: f32, f16 or bf16."""

    name: str
    rank: int
    scaling: float
    dtype: str
    a: bytes
    b: bytes


class PutLora(msgspec.Struct, frozen=True, array_like=True, tag="put_lora"):
    """Between two steps: a slot gets these modules of the adapter with this digest. `first`: what was in it goes, and
    nobody uses that any more; `last`: this was all of it, and requests may name it from now on. All modules of a layer
    come together."""

    slot: int
    digest: str
    modules: tuple[LoraModule, ...]
    first: bool = False
    last: bool = False


class Probe(msgspec.Struct, frozen=True, array_like=True, tag="probe"):
    """Say what is there: memory, bytes per KV block."""


class KVCut(msgspec.Struct, frozen=True, array_like=True):
    """KV of another layout that is on this node: its number, and blocks on each of its ranks. `blocks`: of each lane
    those that count, in the order in which they are to have the numbers 0, 1, ..., int32. `full`: of these numbers
    those of full blocks, int32."""

    layout: Layout
    number: int
    num_blocks: int
    blocks: tuple[bytes, ...]
    full: tuple[bytes, ...] = ()


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """Make the KV cache of `num_blocks` blocks, or have the one of this number, if it is there, and warm up. `full`: of
    each lane, blocks that are full and count, int32: a rank that hasn't computed them itself says which don't hold what
    they are to hold (Ready's fact `damaged`), where it can know. `recut`: it begins with what this has, and says the
    same of its blocks."""

    num_blocks: int
    number: int = 0
    full: tuple[bytes, ...] = ()
    recut: KVCut | None = None


class Call(msgspec.Struct, frozen=True, array_like=True, tag="call"):
    """Run a worker's method by name with plain arguments."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}


class FreeMemory(msgspec.Struct, frozen=True, array_like=True, tag="free_memory"):
    """Give KV back, and weights if that is said; the next epoch has them again. Answered with Ready."""

    weights: bool = False


class Exit(msgspec.Struct, frozen=True, array_like=True, tag="exit"):
    """Release everything and end."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """Regroup, Load, SendExperts, PlaceExperts, PutLora, Allocate are done. `seconds` by part, for the start-up's
    summary."""

    rank: int
    seconds: dict[str, float] = {}
    facts: dict[str, Any] = {}


class Facts(msgspec.Struct, frozen=True, array_like=True, tag="facts"):
    """Answer to Probe; bytes. shared_bytes: of the weights, those that are once in its node's memory, whoever has them
    under this name."""

    rank: int
    block_bytes: int
    available_bytes: int
    weight_bytes: int
    shared_bytes: int = 0
    shared_as: str = ""


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    rank: int
    value: Any = None


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """A rank's exception: phase, one line, the whole traceback. A failure of kind "peer" is another rank's doing."""

    rank: int
    phase: str
    message: str
    traceback: str
    kind: str = "error"  # "model": ModelError, "capacity": CapacityError, "config": ConfigError, "peer", "error"


Command = (
    Join
    | Regroup
    | Load
    | SendExperts
    | PlaceExperts
    | PutLora
    | Probe
    | Allocate
    | StepPlan
    | Call
    | FreeMemory
    | Exit
)
Reply = Hello | Ready | Facts | Done | StepResult | Failed
