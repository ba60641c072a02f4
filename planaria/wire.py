"""What front ends and engines say to each other: typed messages, in process or over a local socket as msgpack.

The engine answers every `Submit` with deltas, the last of which has `finish` set, whatever happens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from planaria.types import Delta, SamplingParams


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """One sequence to generate (a request with n > 1 is n of these). `output`: tokens it already has (re-admission)."""

    id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    eos_ids: tuple[int, ...] = ()
    priority: int = 0
    output: list[int] = []


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    id: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag="shutdown"):
    """End now; open requests are answered with finish "abort"."""


class Report(msgspec.Struct, frozen=True, array_like=True, tag="report"):
    """Say which processes there are; answered with `Processes`."""


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


class EngineStats(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    """A snapshot, sent with every step's deltas. Counters count from the engine's start."""

    step: int = 0
    epoch: int = 0
    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0  # 0..1
    prefix_queries: int = 0  # tokens looked up
    prefix_hits: int = 0  # tokens found
    preemptions: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    replayed_tokens: int = 0  # computed again after a loss


class Output(msgspec.Struct, frozen=True, array_like=True, tag="output"):
    deltas: list[Delta]
    stats: EngineStats


class Dead(msgspec.Struct, frozen=True, array_like=True, tag="dead"):
    """The engine ends. `kind` as in protocol.Failed: it has answered everybody, and another would do no better; or
    "crash": it failed itself, and its requests are open. `message` one line, `detail` a traceback or ""."""

    kind: str
    message: str
    detail: str = ""


class Recovery(msgspec.Struct, frozen=True, array_like=True, tag="recovery"):
    """A fault, and what was done about it: said when it is noticed (`seconds` empty) and when requests go on.

    `seconds` by part: detect, fence, replace, and the phases of coming up; `layout` as in EngineFacts.
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


class Phase(msgspec.Struct, frozen=True, array_like=True, tag="phase"):
    """Start-up, for people: a rank begins a phase (launch, connect, groups, load, probe KV, warm-up, ready), or ended
    it after `seconds`."""

    rank: int
    phase: str
    seconds: float | None = None


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="progress"):
    """Start-up, for people: part name and fraction done (0..1)."""

    part: str
    fraction: float


class ProcessInfo(msgspec.Struct, frozen=True):
    """One process of a deployment. role: server, engine, worker or spare. coordinates: by axis, those of a worker.
    state: what it does, in a word or two. resident: bytes of memory, as the kernel counts them (shared ones too)."""

    role: str
    rank: int | None
    coordinates: dict[str, int]
    pid: int
    node: str
    epoch: int | None
    state: str
    resident: int


class Processes(msgspec.Struct, frozen=True, array_like=True, tag="processes"):
    """The engine's own process, then its ranks in order, then spares."""

    processes: list[ProcessInfo]


ToEngine = Submit | Cancel | Report | Shutdown
StartUpNews = Phase | Progress
FromEngine = EngineFacts | Output | Dead | Recovery | Phase | Processes | Progress

Sink = Callable[[Delta], None]


class EngineClient(Protocol):
    """How a front end uses an engine, wherever it runs. Called from one event loop; sinks are called there too."""

    facts: EngineFacts | None  # None until ready
    stats: EngineStats
    last_progress: float  # time.monotonic() of the last message that showed a new step, or of the last idle state
    dead: Dead | None
    on_recovery: Callable[[Recovery], None]  # hears of every fault, and of its end

    async def ready(self) -> EngineFacts:
        """Wait until the engine can admit. Raises ModelError, CapacityError or EngineDead if it can't."""
        ...

    def submit(self, message: Submit, sink: Sink) -> None:
        """Start a sequence; `sink` gets its deltas in order, the last with `finish` set."""
        ...

    def cancel(self, request_id: str) -> None:
        """Stop a sequence; its sink hears nothing more. Unknown ids are ignored."""
        ...

    async def report(self) -> list[ProcessInfo]:
        """The engine's processes; what can be said without the engine where it doesn't answer."""
        ...

    async def close(self) -> None:
        """End the engine. Idempotent."""
        ...


