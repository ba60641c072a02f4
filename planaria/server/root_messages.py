"""What the root process and its API processes say to each other.

The root says how the engines are as a whole (`State`), at each change; an API process compares. An order is answered
with `Done`, a question with `Answer`, by number.
"""

from __future__ import annotations

import msgspec

from planaria.config.options import EngineConfig
from planaria.core.quarantine import ExclusiveUse
from planaria.executor.link.keys import Keys
from planaria.server.config import ServerConfig
from planaria.server.engine_client import Ended
from planaria.server.loras import NamedLora
from planaria.wire import Dead


class Boot(msgspec.Struct, frozen=True):
    """What an API process is started with. number: no other of this server ever has the same."""

    config: EngineConfig
    settings: ServerConfig
    tokenizer: bool
    number: int


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. process: number of its process, 0: none was started yet; ended: how that one did; as_told: because
    the root told it to; dead: there will be no other; exclusive_use: who runs something alone in it."""

    index: int
    process: int = 0
    pid: int = 0
    address: str = ""
    keys: Keys | None = None
    ended: Ended | None = None
    as_told: bool = False
    dead: Dead | None = None
    joined: bool = False
    leaving: bool = False
    kind: str = ""
    exclusive_use: ExclusiveUse | None = None


class TracedRecovery(msgspec.Struct, frozen=True):
    """One that was recorded, for requests to link to. when: time.time_ns() of its end; trace, span: its ids, in hex."""

    engine: int
    when: int
    trace: str
    span: str


class State(msgspec.Struct, frozen=True, tag="state"):
    engines: list[Listed]
    loras: list[NamedLora] = []
    recoveries: list[TracedRecovery] = []


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Admit nothing, finish what is open, end. A second one: abort what is open."""


class ApiOrder(msgspec.Struct, frozen=True, tag="order"):
    """what: "hand over" all that `engine` has to others, "take share" of what runs for `engine`, "empty": wait until
    `engine` has nothing any more (`timeout` seconds at most), "settle": wait until engines that are not in the last
    `State` have been left, "count": say `Counts`."""

    id: int
    what: str
    engine: int = -1
    timeout: float = 0.0


class ForwardedAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """To a `Question`: an HTTP response."""

    id: int
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class Counts(msgspec.Struct, frozen=True):
    """What an API process has counted since its start, and what it has open. open: engine -> (sequences, tokens of its
    load); taken: engine -> sequences that came from another; moved: time.monotonic() of the last progress, 0.0 where
    nothing is open; times: buckets and sum of each histogram of `Metrics`; responses: see ResponseStore.numbers."""

    requests: int = 0
    open: dict[int, tuple[int, int]] = {}
    taken: dict[int, int] = {}
    moved: float = 0.0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    success: dict[str, int] = {}
    times: list[tuple[list[int], float]] = []
    responses: list[int] = []


class OrderDone(msgspec.Struct, frozen=True, tag="done"):
    """An order was carried out, or `error` says why not. moved: sequences."""

    id: int
    moved: int = 0
    error: str = ""
    counts: Counts | None = None


class Serving(msgspec.Struct, frozen=True, tag="serving"):
    """It accepts connections."""


class Unable(msgspec.Struct, frozen=True, tag="unable"):
    """It can't serve with these options, nor could another."""

    why: str


class Question(msgspec.Struct, frozen=True, tag="question"):
    """An HTTP request that is the root's to answer. client: its address."""

    id: int
    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    client: tuple[str, int] | None
    scheme: str


class Kill(msgspec.Struct, frozen=True, tag="kill"):
    """An engine's process can't be trusted any more."""

    engine: int
    process: int
    why: str


class Wants(msgspec.Struct, frozen=True, tag="wants"):
    """To run something alone in an engine, or nothing any more."""

    engine: int
    alone: bool


class LetGo(msgspec.Struct, frozen=True, tag="let go"):
    """Nothing of it is in the engine, for this exclusive use."""

    engine: int
    serial: int


class Replayed(msgspec.Struct, frozen=True, tag="replayed"):
    """After the end of an engine's process so much of this API process's goes on in another."""

    engine: int
    requests: int
    tokens: int


FromRoot = State | Stop | ApiOrder | ForwardedAnswer
ToRoot = Serving | Unable | OrderDone | Question | Kill | Wants | LetGo | Replayed
