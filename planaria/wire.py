"""What front ends and engines say to each other: typed messages, in process or over a local socket as msgpack.

The engine answers every `Submit` with deltas, the last of which has `finish` set, whatever happens.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.core.stats import EngineStats as EngineStats
from planaria.core.stats import ExpertStats as ExpertStats
from planaria.core.stats import StoreStats as StoreStats
from planaria.core.stats import TierStats as TierStats
from planaria.core.stats import TransferStats as TransferStats
from planaria.protocol import LoraModule
from planaria.topology import LaneGroup, Layout
from planaria.topology.table import CameUp
from planaria.types import Delta, KVLease, KVOffer, Request, SamplingParams


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """One sequence to generate (a request with n > 1 is n of these). `output`: tokens it already has (re-admission).
    `cache_salt`: its KV is found by requests with the same one alone. `persist`: what is computed of it is wanted
    again, also after a restart. `lends`: it ends here with its first token, finish "lent", and goes on elsewhere with
    the lease of that delta; `lease`: what another engine has lent to it, or offers. `adapter`: digest of the adapter it
    is computed with, which the engine is given by `LoadLora`; empty: none. `offers`: other servers will fetch its
    blocks. `pause`: its prompt is computed in parts, so that a step takes about so many seconds; 0: in as few as can
    be."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_ids: tuple[int, ...] = ()
    priority: int = 0
    output: list[int] = []
    cache_salt: str = ""
    persist: bool = False
    lends: bool = False
    lease: KVLease | KVOffer | None = None
    adapter: str = ""
    offers: bool = False
    pause: float = 0.0

    @property
    def shared_by(self) -> str:
        """What requests have in common that may share KV, besides tokens."""
        return self.adapter + self.cache_salt

    def request(self, arrival: float) -> Request:
        return Request(
            self.id, self.prompt, self.params, self.seed, max_tokens=self.max_tokens, eos_ids=self.eos_ids,
            arrival=arrival, priority=self.priority, output=list(self.output), salt=self.cache_salt,
            persist=self.persist, lends=self.lends, lease=self.lease, adapter=self.adapter,
            offers=self.offers, pause=self.pause,
        )  # fmt: skip


class Release(msgspec.Struct, frozen=True, array_like=True, tag="release"):
    """Nobody needs the lease `id` of the KV `number` any more. Unknown ones are ignored."""

    number: int
    id: int


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    id: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End now; open requests are answered with finish "abort". followed: by another engine, in another process."""

    followed: bool = False


class LoadLora(msgspec.Struct, frozen=True, array_like=True, tag="load_lora"):
    """Part `part` of `parts` of the adapter with this digest, which requests may name from now on: the modules of a
    layer or several. A digest that is known already is not an error."""

    digest: str
    part: int
    parts: int
    modules: tuple[LoraModule, ...]


class UnloadLora(msgspec.Struct, frozen=True, array_like=True, tag="unload_lora"):
    """No other request will name it. Those that are open end with it, and so do those on their way."""

    digest: str


class Share(msgspec.Struct, frozen=True, array_like=True, tag="share"):
    """So many engines use this node's cores from now on, this one counted."""

    engines: int


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Say which processes there are; answered with `Processes`."""


class Gone(msgspec.Struct, frozen=True, array_like=True, tag="gone"):
    """Another client of the engine's socket has ended: what it has asked for is cancelled."""

    client: str  # by the name it has come under


class EngineFacts(msgspec.Struct, frozen=True, array_like=True, tag="facts"):
    """Said once, when the engine can admit. Sizes in tokens and bytes; `seconds` by start-up part."""

    model: str
    max_model_len: int
    vocab_size: int
    num_parameters: int
    dtype: str
    quantization: str
    device: str
    threads: int
    num_blocks: int
    block_size: int
    weight_bytes: int
    executor: str
    link: str
    layout: str
    ranks: list[int]  # pids
    seconds: dict[str, float]
    places: list[CameUp] = []  # by rank
    kv_bytes: int = 0  # of a rank
    drafts: tuple[str, int] | None = None  # who drafts, and how many tokens of a sequence in a step at most
    shared_bytes: int = 0  # of the weights, in memory that other engines of the node share
    committed: dict[str, int] = {}  # that the engine before it had computed: tokens of requests, by name in hex
    weights_number: int = 0  # see UpdateWeights
    attention: list[str] = []  # how layers compute it, where there is a choice


class Output(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    deltas: list[Delta]
    stats: EngineStats


class Dead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """The engine ends. `kind` as in protocol.Failed: another would do no better, and it answers what is open; or
    "crash": it failed itself, and its requests are open. `message` one line, `detail` a traceback or ""."""

    kind: str
    message: str
    detail: str = ""


class Travel(msgspec.Struct, frozen=True, array_like=True):
    """What ranks got of experts when they were formed again. moved: bytes from others' memory; needed: bytes that had
    to move, or to be read, wherever the experts go; read: experts that were read from the checkpoint."""

    moved: int = 0
    needed: int = 0
    read: int = 0


class Recovery(msgspec.Struct, frozen=True, array_like=True, tag="recovery"):
    """A fault, and what was done about it: said when it is noticed (`seconds` empty), when requests go on, and once
    more when every sequence that had tokens has another.

    `seconds` by part: detect (from the first sign until it was sure), fence, replace (until all processes are there),
    regroup, load, and `total`, all these; the last time also what came after: "first token", and "replay", until all
    had one. `layout` as in EngineFacts.
    """

    epoch: int  # that begins with it
    ranks: list[int]  # none: it was the engine's own process
    phase: str
    cause: str
    traceback: str = ""
    seconds: dict[str, float] = {}
    layout: str = ""
    pids: list[int] = []
    requests: int = 0  # open, and replayed
    tokens: int = 0  # that are computed again
    kind: str = "fault"  # or "layout": nothing failed, the engine changes its layout
    engine: int = 0  # whose it was: its number in the fleet
    places: list[CameUp] = []  # as in EngineFacts, once they are there
    travel: Travel | None = None  # where experts are dealt to ranks whole


class Phase(msgspec.Struct, frozen=True, array_like=True, tag="phase"):
    """Start-up, for people: a rank begins a phase (launch, connect, groups, load, probe KV, warm-up, ready), or ended
    it after `seconds`."""

    rank: int
    phase: str
    seconds: float | None = None


class Placed(msgspec.Struct, frozen=True, array_like=True, tag="placed"):
    """Where the engine's ranks are about to be started, said by who places them. source: on what; ranks: by rank its
    node, the node's address, the device's number there, and the bundle of the engine's placement group."""

    source: str
    layout: Layout
    ranks: list[tuple[str, str, int, int]]


class Listens(msgspec.Struct, frozen=True, array_like=True, tag="listens"):
    """The port at which the engine, which has several nodes, waits for the others, until it ends."""

    port: int


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Start-up, for people: part name and fraction done (0..1)."""

    part: str
    fraction: float


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process of a deployment. role: server, api, engine, worker or spare. coordinates: by axis, those of a worker.
    state: what it does, in a word or two. resident: bytes of memory, as the kernel counts them (shared ones too).
    uptime: seconds; None: of another node. engine: whose it is, by its number in the fleet; ranks count in each."""

    role: str
    rank: int | None
    coordinates: dict[str, int]
    pid: int
    node: str
    epoch: int | None
    state: str
    resident: int
    uptime: float | None = None
    engine: int | None = None
    kind: str = ""  # of an engine, where there are two: prefill or decode
    model: str = ""  # whose it is, of a server of several


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """Somebody told the engine's process to end (SIGTERM). It goes on until it hears Shutdown."""


class Processes(msgspec.Struct, frozen=True, array_like=True, tag="processes"):
    """The engine's own process, then its ranks in order, then spares."""

    processes: list[ProcessInfo]


class ReportExperts(msgspec.Struct, frozen=True, array_like=True, tag="report_experts"):
    """Say which experts are where, and what their load is; answered with `ExpertLoads`."""


class LayerLoad(msgspec.Struct, frozen=True):
    """A layer with experts. load: tokens of each expert in the window; slots: the expert of each slot, in the order of
    ranks; rank_loads: tokens of each rank, with these slots."""

    layer: int  # of the model
    load: list[int]
    slots: list[int]
    rank_loads: list[float]
    balancedness: float


class ExpertLoads(msgspec.Struct, frozen=True, array_like=True, kw_only=True, tag="expert_loads"):
    """Experts' load in the last steps, and where they are. No layers: load is not recorded."""

    steps: int = 0  # in the window
    num_ranks: int = 0  # that share each layer's experts
    stats: ExpertStats = ExpertStats()
    bytes_needed: int = 0  # what could not have been avoided of what was moved or is to be moved
    rearranging: bool = False
    layers: list[LayerLoad] = []


class ResizeEngine(msgspec.Struct, frozen=True, array_like=True, tag="resize_engine"):
    """Have another layout, in a new epoch and with the same requests. Answered by a EngineResized of the same id."""

    id: str
    tp: int
    pp: int
    dp: int = 0  # lanes; 0: as many as now
    groups: tuple[LaneGroup, ...] = ()  # on Ray where each lane has one: those that are the engine's from then on


class EngineResized(msgspec.Struct, frozen=True, array_like=True, tag="engine_resized"):
    """`layout` in force, as in EngineFacts; `error`: why it is not the one asked for."""

    id: str
    layout: str
    error: str = ""
    seconds: float = 0.0


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag="sleep"):
    """level: 0: compute nothing, and keep all there is; 1: KV is given back, too; 2: and weights; None: wake up. What
    is open stays so. Answered by a Slept of the same id."""

    id: str
    level: int | None


class Slept(msgspec.Struct, frozen=True, array_like=True, tag="slept"):
    """level: that holds now, None: it is awake; `error`: why it is not the one asked for."""

    id: str
    level: int | None
    error: str = ""
    seconds: float = 0.0


class UpdateWeights(msgspec.Struct, frozen=True, array_like=True, tag="update_weights"):
    """Have the weights of another checkpoint of the same model, in a new epoch and with the same requests; number: of
    them, larger than before. Answered by a WeightsUpdated of the same id. beside: they are prepared first, while steps
    go on; otherwise ranks read them at once, for nothing would go on anyway. keep_kv: what has KV goes on from it, and
    shares it with nobody; otherwise it is computed again."""

    id: str
    number: int
    checkpoint: dict[str, Any]  # see EngineConfig
    beside: bool = True
    keep_kv: bool = False


class WeightsUpdated(msgspec.Struct, frozen=True, array_like=True, tag="weights_updated"):
    """number: of the weights that are in force; `error`: why they are not those asked for; pause: seconds in which
    nothing was computed."""

    id: str
    number: int
    error: str = ""
    seconds: float = 0.0
    pause: float = 0.0


class EngineState(msgspec.Struct, frozen=True):
    """One engine behind a front end. state: loading, ready, recovering, asleep or ended. ranks: pids. open: sequences;
    load: tokens, of its KV and still to be computed for them. leaving: it gets no new work."""

    index: int
    state: str
    pid: int
    layout: str
    ranks: list[int]
    stats: EngineStats
    open: int
    load: int
    leaving: bool
    taken: int = 0  # sequences that came here from another engine
    misplaced: list[str] = []  # a line for each of its ranks that is not where it was planned
    kind: str = ""  # prefill or decode, where there are two

    @property
    def shown(self) -> str:
        """The state, for people."""
        return "leaving" if self.leaving else self.state


ToEngine = (
    Submit | Cancel | Release | Gone | LoadLora | UnloadLora | Report | ReportExperts | ResizeEngine | Share | Shutdown
    | Sleep | UpdateWeights
)  # fmt: skip
StartUpNews = Phase | Progress
FromEngine = (
    EngineFacts
    | Output
    | Dead
    | Recovery
    | ExpertLoads
    | Leaving
    | Listens
    | Phase
    | Placed
    | Processes
    | Progress
    | EngineResized
    | Slept
    | WeightsUpdated
)
