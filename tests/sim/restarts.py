"""One seed, one thread: a server that keeps responses with `--journal`, ended and begun anew again and again, and its
clients, which come again with `starting_after`. The shipping service, store of responses, what runs behind them, their
journal with its files and records, and stream of events, on an event loop with a virtual clock; the disk is simulated,
and engines say tokens of the hash model when they like.

Rules
- durable: a response in the background that was acknowledged is there, found by its key, and goes on, whatever ended
  the server; each of its events comes once, with the same number and the same bytes; its text is that of a run without
  any death; what was cancelled stays so, and what a client saw the end of has ended. After a loss of power events that
  were synced are there (what came later may be cut otherwise); after a failing disk what it took
- ends: all are over soon after the last fault
- leaks: at the end there is one file for each response that is known, and none else; no task is left
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from planaria.errors import RequestError
from planaria.server import journal, journal_files
from planaria.server.config import ServerConfig
from planaria.server.gate import RequestInfo
from planaria.server.journal_queue import JournalNews
from planaria.server.kept import Kept
from planaria.server.records import ConversationItem, Head, scan
from planaria.server.response_run import ResponseRun, choices_of, fits
from planaria.server.response_shapes import event_bytes, num_events, response_of
from planaria.server.response_store import ResponseStore
from planaria.server.responses import Followed
from planaria.server.service import Service
from planaria.server.stream import Stream
from planaria.server.tokenise import Pieces
from planaria.types import Delta, FinishReason, SamplingParams
from planaria.wire import EngineFacts, EngineStats, Submit
from tests.reference_worker import hash_tokens
from tests.sim.disk import SimDisk, TreeDied, under
from tests.sim.virtual import VirtualLoop, on_clock
from tests.sim.world import World

VOCAB = 40
TOKENS = [*(bytes([48 + token]) for token in range(34)), b"\xc3", b"\xa9", b" 42", "日".encode(), b"\xe6\x9c", b""]
LOOK = 0.1  # seconds
PATIENCE = 300.0  # seconds within which all is over after the last fault
KINDS = (
    "kill", "kill in a call", "power", "power in a call", "shutdown", "disk fails", "disk fails, then kill",
    "disk hangs",
)  # fmt: skip


class Words:
    """A tokenizer whose tokens are bytes, some of them parts of characters."""

    strip_space = False
    special_ids: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.pieces = (Pieces(self, False), Pieces(self, True))  # type: ignore[arg-type]

    def token_bytes(self, token: int) -> bytes:
        return TOKENS[token]

    def showing(self, marks: tuple[str, ...]) -> Words:
        return self


@dataclass
class Wanted:
    """A response, and what its client knows of it. text: all that its engine says; read: its events, in order; given:
    it was acknowledged; over: its client saw the end; status: how it may have ended. told: its events at the end of the
    last life; sure: how many of them are there in the next. parted: events were lost with power, or with a failing
    disk, and others may have their numbers."""

    head: Head
    text: str
    read: list[bytes] = field(default_factory=list)
    given: bool = False
    over: bool = False
    told: list[bytes] = field(default_factory=list)
    sure: int = 0
    parted: bool = False
    status: set[str] = field(default_factory=lambda: {"incomplete"})


class SimEngines:
    """What a service has of its engines."""

    dead, warm, loras, control, stats = None, True, None, None, EngineStats()
    on_recovery = on_settled = None

    def __init__(self, sim: Restarts) -> None:
        self.sim = sim
        self.members: dict[int, Any] = {}
        self.open: dict[str, Stream] = {}
        self.facts = EngineFacts(
            "hash", 64, VOCAB, 1, "float32", "none", "cpu", 1, 64, 4, 0, "sim", "simulated", "tp=1 pp=1", [1], {}
        )

    def engines(self) -> list[Any]:
        return []

    def submit(self, stream: Stream) -> None:
        self.open[stream.id] = stream

    def cancel(self, id: str) -> None:
        self.open.pop(id, None)

    def step(self) -> None:
        """Of one sequence that is open: some tokens more."""
        if not self.open:
            return
        chance = self.sim.world.random
        stream = self.open[chance.choice(list(self.open))]
        submit, have = stream.submit, len(stream.tokens)
        tokens = hash_tokens(submit.prompt, submit.seed, submit.max_tokens, VOCAB)
        until = min(len(tokens), have + chance.choice([1, 1, 1, 2, 4]))
        finish = FinishReason.LENGTH if until == len(tokens) else None
        if finish is not None:
            del self.open[stream.id]
        stream.push(Delta(stream.name, have, tokens[have:until], finish))


class SimThread:
    """The thread that writes: its turns come when there is something to do and the disk is ready. busy: one is on its
    way."""

    def __init__(self, sim: Restarts, target: Callable[..., None], args: tuple[Any, ...]) -> None:
        self.sim, self.said = sim, args[0]
        self.writes: journal.Journal = target.__self__  # type: ignore[attr-defined]
        self.busy = self.over = False

    def start(self) -> None:
        self.writes._changed.woken = self.look  # type: ignore[attr-defined]
        self.look()

    def look(self) -> None:
        """Something was put, or is due."""
        world, pause = self.sim.world, self.writes.pause(self.sim.world.now)
        if self.busy or self.over or pause is None:
            return
        if pause > 0.0:
            self.sim.later(pause, self.look)
            return
        self.busy, self.writes._began = True, world.now
        self.sim.later(world.random.choice([0.0, 0.001, 0.02, 0.3]) + self.sim.hangs(), self._turn)

    def _turn(self) -> None:
        self.over = not self.writes.turn(self.said)
        self.busy, self.writes._began = False, 0.0
        self.look()

    def join(self, timeout: float) -> None:
        while not self.over and self.writes.pause(self.sim.world.now) == 0.0:
            self.over = not self.writes.turn(self.said)

    def is_alive(self) -> bool:
        return not self.over


class SimCondition:
    woken: Callable[[], None] = staticmethod(lambda: None)

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...

    def notify(self) -> None:
        self.woken()


class Restarts:
    def __init__(self, seed: int) -> None:
        self.seed, self.world = seed, World(seed)
        self.counts: Counter[str] = Counter()
        chance = random.Random(f"restarts of {seed}")
        self.disk = SimDisk(self.world.random)
        self.kinds = chance.sample(KINDS, chance.choice([1, 2, 3, len(KINDS)]))
        self.left, self.chance = chance.choice([0, 3, 6, 10]), chance.choice([0.01, 0.03, 0.1])
        self.to_ask = sorted(chance.uniform(0, 4) for _ in range(chance.randint(1, 6)))
        self.wanted: dict[str, Wanted] = {}
        self.life, self.hanging, self.num_asked = 0, 0.0, 0
        self.ahead: set[str] = set()  # responses, see `_hear`
        self.asking = 0  # requests that are not yet answered
        self.ended = self.in_a_call = ""  # how this life has, and how the next does that ends in a call
        self.service: Service
        self.engines: SimEngines

    @property
    def store(self) -> ResponseStore:
        return self.service.responses

    # -- what simulated parts ask

    def later(self, delay: float, act: Callable[[], None]) -> None:
        """In this life of the server."""
        life = self.life
        self.world.at(delay, lambda: act() if life == self.life else None)

    def hangs(self) -> float:
        """Seconds that the disk doesn't answer for."""
        seconds, self.hanging = self.hanging, 0.0
        return seconds

    # -- the run

    def run(self) -> None:
        before = ""
        while not before == self.ended == "done":  # it begins once more, to look what is there
            before, self.ended = self.ended, ""
            self.disk.begin()
            with self._machine() as loop:
                try:
                    loop.run_until_complete(self._serve())
                    self.world.require(not asyncio.all_tasks(loop), "leaks", f"tasks {asyncio.all_tasks(loop)}")
                except TreeDied:
                    self.disk.ended = True
                    self.ended = self.ended or self.in_a_call
                self.life += 1  # nothing that is on its way comes any more
            self._over()
        self.counts["responses"] += len(self.wanted)

    @contextmanager
    def _machine(self) -> Iterator[VirtualLoop]:
        threads = SimpleNamespace(
            Condition=SimCondition, Thread=lambda target, args, **named: SimThread(self, target, args)
        )
        with (
            under(journal_files, self.disk), patch.object(journal, "threading", threads), on_clock(self.world) as loop,
        ):  # fmt: skip
            yield loop

    def _over(self) -> None:
        """A life is. What is sure to be found by the next?"""
        self.world.note("the server has ended: {}", self.ended)
        self.counts[f"server: {self.ended}"] += 1
        power, unsure = self.ended.startswith("power"), self.ahead | self.store.failing
        for id, wanted in self.wanted.items():
            kept = Kept.of(scan(self.disk.safe(id + journal_files.VERSION))[0]) if power else None
            known = self.store.known.get(id)
            wanted.told = _events(known.kept) if known is not None else []
            if power:
                wanted.sure = num_events(kept) if kept is not None else 0
            else:
                wanted.sure = 0 if id in unsure else len(wanted.told)
            if (power and (kept is None or not kept.over)) or id in unsure:
                wanted.status |= {"incomplete"}  # that it was cancelled may be lost, too
            wanted.parted = wanted.parted or wanted.sure < len(wanted.told)
        if power:
            self.disk.lose_power()

    def _hear(self, news: list[JournalNews], hear: Callable[[list[JournalNews]], None]) -> None:
        """Which responses are told as they come, since the disk fails, and are not written yet?"""
        self.ahead |= self.store.failing
        hear(news)
        self.ahead |= self.store.failing
        for one in news:
            entry = self.store.known.get(one.id)
            if one.what == "written" and entry is not None and one.count >= entry.kept.told:
                self.ahead.discard(one.id)

    async def _serve(self) -> None:
        world, tasks = self.world, list[asyncio.Task[None]]()
        self.engines = SimEngines(self)
        self.service = Service(self.engines, Words(), ServerConfig())  # type: ignore[arg-type]
        self.store.use(journal.Journal("/simulated"))
        self.ahead.clear()
        assert self.store.journal is not None
        hear = self.store.journal.tell
        self.store.journal.tell = lambda news: self._hear(news, hear)
        self._look_what_is_there()
        self.disk.meanwhile = self._meanwhile
        tasks += [asyncio.create_task(self._follow(wanted)) for wanted in self.wanted.values()]
        await self.store.go_on()
        self._engines_go_on()
        quiet = world.now
        while self.to_ask or self.store.unfinished or self.store.failing or not all(map(_over, self.wanted.values())):
            await asyncio.sleep(LOOK * world.random.random())
            world.require(world.now < quiet + PATIENCE, "ends", f"{list(self.store.unfinished)} are not over")
            while self.to_ask and self.to_ask[0] <= world.now:
                self.to_ask.pop(0)
                tasks.append(asyncio.create_task(self._ask()))
                quiet = world.now
            if self.left and world.random.random() < self.chance:
                self.left, quiet = self.left - 1, world.now
                self._inject(world.random.choice(self.kinds))
            elif world.random.random() < 0.02 and (open_ones := [w for w in self.wanted.values() if w.given]):
                tasks.append(asyncio.create_task(self._cancel(world.random.choice(open_ones))))
            if self.ended:
                break
        while self.asking:  # a server that ends answers what it has taken first
            await asyncio.sleep(LOOK)
        self.disk.dies_in = -1
        await self.store.close()
        for task in tasks:
            task.cancel()
        for done in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(done, Exception):
                raise done
        self.service.close()
        if not self.ended:
            self.ended = "done"
            files, known = sorted(self.disk.there()), sorted(id + journal_files.VERSION for id in self.store.known)
            world.require(files == known, "leaks", f"files {files} of {known}")

    def _meanwhile(self) -> None:
        """The event loop goes on while the disk is waited for."""
        if self.world.random.random() < 0.5:
            self.engines.step()

    def _engines_go_on(self) -> None:
        self.engines.step()
        self.later(self.world.random.choice([0.005, 0.05, 0.4]), self._engines_go_on)

    # -- faults

    def _inject(self, kind: str) -> None:
        chance = self.world.random
        self.world.note("FAULT {}", kind)
        if kind == "disk fails, then kill":
            self.later(chance.uniform(1.0, 3.0), lambda: self._inject("kill"))
            kind = "disk fails"
        match kind:
            case "kill" | "power":
                self.ended = kind
                raise TreeDied
            case "kill in a call" | "power in a call":
                self.disk.dies_in, self.in_a_call = chance.randint(1, 12), kind
            case "shutdown":
                self.ended = kind
            case "disk fails":
                self.counts[f"journal: {kind}"] += 1
                self.disk.failing = {*chance.choice([("write",), ("sync",), ("write", "sync")])}
                self.later(chance.choice([0.1, 1.0, 5.0]), self._disk_is_well)
            case "disk hangs":
                self.counts[f"journal: {kind}"] += 1
                self.hanging = chance.choice([1.0, 7.0, 12.0])

    def _disk_is_well(self) -> None:
        self.disk.failing = set()

    # -- clients

    async def _ask(self) -> None:
        chance, number = self.world.random, self.num_asked
        self.num_asked += 1
        uid, background = f"{number:032x}", chance.random() < 0.8
        prompt, count = [chance.randrange(VOCAB) for _ in range(3)], chance.randint(1, 40)
        submit = Submit(uid, prompt, SamplingParams(max_tokens=count), seed=number, max_tokens=count)
        head = Head(
            f"resp_{uid}", "owner", int(self.world.now), background, "hash", fits(self.store), {},
            [ConversationItem("i", "user", ["x"])], submit, f"key {uid}" if background else "", "digest",
        )  # fmt: skip
        text = b"".join(TOKENS[token] for token in hash_tokens(prompt, number, count, VOCAB))
        wanted = self.wanted[head.id] = Wanted(head, text.decode("utf-8", "replace"))
        self.asking += 1
        try:
            entry = self.store.add(head, stored=True)
            await self.store.accept(entry)
        except RequestError as e:
            self.world.note("{} is refused: {}", number, e)
            self.counts["responses refused"] += 1
            del self.wanted[head.id]
            return
        finally:
            self.asking -= 1
        self.world.note("{} is taken", number)
        wanted.given = background
        run = ResponseRun(
            self.store,
            entry,
            RequestInfo(head.id, uid, "POST", "/v1/responses"),
            choices_of(self.service, submit, None),
        )
        run.start()
        await self._follow(wanted)
        wanted.given = wanted.given or wanted.over

    async def _follow(self, wanted: Wanted) -> None:
        """Read on, from the event after the last one."""
        entry = self.store.known[wanted.head.id]

        async def send(message: MutableMapping[str, Any]) -> None:
            for event in message.get("body", b"").split(b"\n\n")[:-1]:
                number = json.loads(event.partition(b"data: ")[2])["sequence_number"]
                here = number == len(wanted.read)
                self.world.require(here, "durable", f"event {number} of {wanted.head.id} after {len(wanted.read)}")
                wanted.read.append(event)

        await Followed(entry, len(wanted.read))._send(send)
        if entry.kept.over:
            self._has_ended(wanted, entry.kept)

    def _has_ended(self, wanted: Wanted, kept: Kept) -> None:
        require, answer = self.world.require, response_of(kept)
        status, text = answer["status"], "".join(item["content"][0]["text"] for item in answer["output"])
        require(status in wanted.status, "durable", f"{wanted.head.id} is {status}: {answer['error']}")
        whole = wanted.text == text if status == "incomplete" else wanted.text.startswith(text.rstrip("\ufffd"))
        require(whole, "durable", f"{wanted.head.id} has another text: {text!r}, not {wanted.text!r}")
        if not wanted.parted:
            require(wanted.read == _events(kept), "durable", f"{wanted.head.id} was told otherwise")
        wanted.over, wanted.status = True, {status}

    async def _cancel(self, wanted: Wanted) -> None:
        entry = self.store.known[wanted.head.id]
        if not wanted.over:
            wanted.status.add("cancelled")
        if entry.run is not None:
            entry.run.cancel("cancelled")
        self.store.end(entry, "cancelled")
        while not entry.kept.over and not entry.cut:
            await entry.more.wait()
        if entry.kept.over:
            wanted.status = {entry.kept.status}

    # -- what another server finds

    def _look_what_is_there(self) -> None:
        require, store = self.world.require, self.store
        for id, wanted in list(self.wanted.items()):
            entry, head = store.known.get(id), wanted.head
            if entry is None and not (wanted.given and (head.background or wanted.sure)):
                del self.wanted[id]  # it was never acknowledged, or ran for its client and was over a moment ago
                continue
            require(entry is not None, "durable", f"{id} was acknowledged and is not there")
            assert entry is not None
            if head.key:
                found = store.by_key.get((head.owner, head.key))
                require(found is entry, "durable", f"{id} is not known by its key")
            events, told, sure = _events(entry.kept), wanted.told, wanted.sure
            require(len(events) >= sure, "durable", f"{id}: {sure} events were told for sure, there are {len(events)}")
            require(events[:sure] == told[:sure], "durable", f"{id}: events that were told are others")
            if not wanted.parted:
                same = wanted.read == events[: len(wanted.read)]
                require(same, "durable", f"{id}: events that a client has are others, or gone")
            wanted.over = False  # it is followed to its end again


def _over(wanted: Wanted) -> bool:
    return wanted.over


def _events(kept: Kept) -> list[bytes]:
    return [event_bytes(kept, number).removesuffix(b"\n\n") for number in range(num_events(kept))]


def lines(sim: Restarts) -> list[str]:
    return [f"seed {sim.seed}: a server that is ended and begun again, {sim.kinds}", *sim.world.lines()]
