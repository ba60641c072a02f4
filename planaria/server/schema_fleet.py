"""Requests and answers of the routes for who runs the fleet, as `schema.py` has those of the API."""

from __future__ import annotations

from pydantic import Field

from planaria.server.schema import HealthReport, ProcessEntry, Strict


class ScaleRequest(Strict):
    """As in vLLM; `id` is ours."""

    new_data_parallel_size: int = Field(
        ge=0, le=2**31 - 1, description="Engines to have; of an engine whose data-parallel ranks share experts: lanes."
    )
    prefill: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Of them for prompts, where there are engines of two kinds."
    )
    drain_timeout: float | None = Field(
        None, ge=0, le=86400, description="Seconds that requests may stay in engines that leave; 120 if left out."
    )
    id: str | None = Field(
        None, min_length=1, max_length=128,
        description="Of the transaction: with the same id it is not done twice, and the answer is the same.",
    )  # fmt: skip


class ResizeEntry(Strict):
    id: str
    before: int  # engines or lanes, see `unit`
    after: int
    start: list[int]  # numbers of engines
    stop: list[int]
    state: str  # preparing, committed or rolled back
    reason: str  # why it was rolled back
    phase: str  # that is under way
    phases: dict[str, float]  # seconds
    moved: int  # sequences that went on in another engine
    unit: str  # engine, or lane: a data-parallel rank of one engine


class ExpertLayer(Strict):
    layer: int  # of the model
    load: list[int]  # tokens of each expert
    slots: list[int]  # the expert of each slot, in the order of ranks
    rank_loads: list[float]  # tokens of each rank; an expert's replicas share its tokens
    balancedness: float


class EngineExperts(Strict):
    engine: int
    ranks: int  # that share each layer's experts; slots are dealt to them in order, earlier ranks have one more
    steps: int  # that loads are of: the window
    balancedness: float  # of all layers: mean over maximum of the ranks' loads
    rearrangements: int
    rearranging: bool
    seconds_since: float | None  # the last rearrangement; none: there was none
    bytes_moved: int  # between ranks
    bytes_needed: int  # what of that, and of what is being moved, could not have been avoided
    layers: list[ExpertLayer]


class ExpertsResponse(Strict):
    engines: list[EngineExperts]  # those that balance their experts


class ScaleResponse(ResizeEntry):
    message: str


class LayoutRequest(Strict):
    tensor_parallel_size: int = Field(ge=1, le=2**31 - 1, description="Ranks that share each layer.")
    pipeline_parallel_size: int = Field(1, ge=1, le=2**31 - 1, description="Stages of layers.")


class EngineLayout(Strict):
    engine: int
    layout: str
    seconds: float  # until requests went on


class LayoutResponse(Strict):
    engines: list[EngineLayout]


class WeightsRequest(Strict):
    """One of both."""

    path: str | None = None  # of a folder or file where the engines are
    handle: str | None = None  # of SharedWeights on their node
    keep_kv: bool = False  # what runs goes on from the KV that it has, of the weights of before


class EngineWeights(Strict):
    engine: int
    weights_version: int
    seconds: float
    pause: float  # seconds in which nothing was computed


class WeightsResponse(Strict):
    engines: list[EngineWeights]


class EngineLevel(Strict):
    engine: int
    level: int | None  # null: it is awake


class SleepResponse(Strict):
    is_sleeping: bool
    engines: list[EngineLevel]


class EngineEntry(Strict):
    engine: int  # its number
    state: str  # loading, ready, recovering, leaving or ended
    pid: int
    ranks: list[int]  # pids
    layout: str
    epoch: int
    running: int
    waiting: int
    kv_usage: float
    open: int  # sequences
    load_tokens: int  # in KV, and still to be computed for what is open
    misplaced: list[str]  # a line for each rank that is not where it was planned
    kind: str  # prefill or decode, where there are two


class FleetResponse(Strict):
    size: int
    imbalance: float  # the highest load over the mean
    engines: list[EngineEntry]
    resizes: list[ResizeEntry]


class Event(Strict):
    """A fault, or a change of the layout. seconds: until requests went on; null while it is being dealt with."""

    when: str
    engine: int
    what: str
    cause: str
    layout: str
    epoch: int
    seconds: float | None


class EngineCard(Strict):
    engine: int
    state: str
    layout: str
    open: int
    load_tokens: int


class Dashboard(Strict):
    now: float  # seconds since 1970
    version: str
    models: list[str]
    health: HealthReport
    requests: int
    processes: list[ProcessEntry]
    engines: list[EngineCard]
    columns: list[str]  # of a sample
    samples: list[list[float | None]]
    events: list[Event]
    resizes: list[ResizeEntry]
    experts: list[EngineExperts]


class LoadLoraRequest(Strict):
    """As in vLLM."""

    lora_name: str = Field(min_length=1, max_length=256, description="What requests name as their model.")
    lora_path: str = Field(
        min_length=1, max_length=4096, description="Folder on the server's machine, as peft writes it."
    )
    base_model_name: str | None = Field(None, description="Has no effect.")
    load_inplace: bool | None = Field(None, description="Has no effect: a name that is known gets the new bytes.")


class UnloadLoraRequest(Strict):
    """As in vLLM."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_int_id: int | None = Field(None, description="Has no effect.")


class LoraResponse(Strict):
    """digest: of the adapter's bytes, that requests have from when they are admitted."""

    lora_name: str
    digest: str
    message: str
