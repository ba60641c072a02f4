"""Which engine of a fleet takes a request. Pure: no clock, and draws come from a counter and the caller's seed.

An engine's load is counted in tokens: what is in its KV or will be, and, with more weight, prompts that it still has
to compute. The KV part is what the engine last said, corrected by what was sent to it and what ended since; several
front ends with a router each see one another's requests through those snapshots. Two open engines are drawn, and those
that hold the beginning of the prompt are looked at too; the request goes where load and its own work (the tokens not
in that KV) are least together. So a prefix draws a request for as long as that saves more than the longer queue costs.

Engines may be of several kinds; a request goes to one of the kind that is asked for. A choice takes the same time among
10,000 engines as among two.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from planaria.core.stats import EngineStats

EngineId = int | str
BLOCK = 128  # tokens of a prefix that are remembered together
HOLDERS = 3  # engines remembered for a block, the latest first
WORK = 4  # a token that waits to be computed counts as so many in KV: it delays everyone behind it
SAVED = 16  # and so does one of the request's own, as work that is saved is saved for all who come later
FIRST_GUESS = 256.0  # output tokens of a request, before any has ended
WEIGHT = 1 / 64  # of the latest request in what is known of the usual one

_MASK = 2**64 - 1


def draw(seed: int, count: int) -> int:
    """64 uniform bits, the `count`th of `seed`: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (seed + (count + 1) * 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & _MASK
    return z ^ z >> 31


def prefix_keys(tokens: Sequence[int], salt: str = "") -> list[int]:
    """A key for each whole block, of it, all before it and the salt: where prefixes of others lie, nobody learns from
    where one's own requests go. Python's own hash, several times faster than the one in kv_cache: it is not salted for
    numbers, and two prefixes with one key only send a request to the wrong place."""
    keys, key = [], int.from_bytes(blake2b(salt.encode(), digest_size=7).digest()) if salt else 0
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        key = hash((key, *tokens[start : start + BLOCK]))
        keys.append(key)
    return keys


class EngineLoad:
    """One engine as this router sees it. Tokens.

    `held`: of requests that began, prompt and output; `coming`: prompts of those that did not; `ahead`: output
    to come, of both; `skew`: what the engine's last snapshot said beyond `held`.
    """

    __slots__ = (
        "ahead", "capacity", "coming", "draining", "held", "id", "incarnation", "kind", "place", "requests", "skew",
        "unbegun", "up",
    )  # fmt: skip

    def __init__(self, id: EngineId, capacity: int | None, kind: str) -> None:
        self.id, self.capacity, self.kind = id, capacity, kind
        self.incarnation = 0  # counts from 1 over the fleet
        self.up, self.draining = True, False
        self.place = -1  # among Router._open of its kind; -1: it gets no new work
        self.requests: dict[str, Booked] = {}
        self.unbegun = 0
        self.held = self.coming = self.ahead = self.skew = 0

    @property
    def tokens(self) -> int:
        return max(0, self.held + self.skew) + (1 + WORK) * self.coming + self.ahead


class Booked:
    """An open request: its place and its share of that engine's load."""

    __slots__ = ("ahead", "begun", "engine", "prompt", "tokens")

    def __init__(self, engine: EngineLoad, prompt: int, ahead: int) -> None:
        self.engine, self.prompt, self.ahead = engine, prompt, ahead
        self.begun, self.tokens = False, 0  # tokens that came


class Router:
    """`seed` of the draws; `memory`: how many blocks of `BLOCK` tokens are remembered, the latest used ones."""

    def __init__(self, seed: int = 0, *, memory: int = 1 << 16) -> None:
        self._seed, self._memory = seed, memory
        self._draws = self._incarnations = 0
        self._engines: dict[EngineId, EngineLoad] = {}
        self._open: dict[str, list[EngineLoad]] = {}  # by kind: those that may get new work, in no order
        self._requests: dict[str, Booked] = {}
        # Incarnations, in order of use. (A plain dict looks at every hole in front of its first entry.)
        self._holders: OrderedDict[int, tuple[int, ...]] = OrderedDict()
        self._alive: dict[int, EngineLoad] = {}  # by incarnation
        self._usual_prompt, self._usual_output = FIRST_GUESS, FIRST_GUESS

    # -- the fleet

    def join(self, id: EngineId, capacity: int | None = None, kind: str = "") -> None:
        """A new engine, up. `capacity`: tokens its KV holds, if known (snapshots say a share of it).

        Raises ValueError if there is one of this id.
        """
        if id in self._engines:
            raise ValueError(f"engine {id!r} is in the fleet already")
        engine = self._engines[id] = EngineLoad(id, capacity, kind)
        self._reborn(engine)
        self._settle(engine)

    def drain(self, id: EngineId, on: bool = True) -> None:
        """It gets no new work (or, `on` False, gets it again); what it has goes on."""
        engine = self._engines[id]
        engine.draining = on
        self._settle(engine)

    def set_kind(self, id: EngineId, kind: str) -> None:
        """It is of another kind from now on; what it has goes on."""
        engine = self._engines[id]
        draining, engine.draining = engine.draining, True
        self._settle(engine)
        engine.kind, engine.draining = kind, draining
        self._settle(engine)

    def is_open(self, kind: str) -> bool:
        """May one of this kind get new work?"""
        return bool(self._open.get(kind))

    def set_up(self, id: EngineId, up: bool) -> None:
        """Down: it recovers. It gets no new work; its requests count as not begun, and its KV as empty."""
        engine = self._engines[id]
        if engine.up and not up:
            self._reborn(engine)
            engine.skew = 0
            for request in engine.requests.values():
                if request.begun:
                    self._begin(request, False)
        engine.up = up
        self._settle(engine)

    def is_up(self, id: EngineId) -> bool:
        return self._engines[id].up

    def leave(self, id: EngineId) -> list[str]:
        """It is out of the fleet. Returns the requests that were still open there; they are forgotten."""
        engine = self._engines.pop(id)
        engine.up = False
        self._settle(engine)
        del self._alive[engine.incarnation]
        left = list(engine.requests)
        for request in left:
            del self._requests[request]
        return left

    # -- requests

    def choose(self, tokens: Sequence[int], max_tokens: int, salt: str = "", kind: str = "") -> EngineId | None:
        """The engine of this kind for a request with this history; None if none is open. The prefix counts as held
        there now, for requests with the same salt."""
        open = self._open.get(kind)
        if not open:
            return None
        keys = prefix_keys(tokens, salt)
        cached = self._cached(keys, kind)
        need = len(tokens) + self._expected(max_tokens)
        best, lowest = open[0], -1
        for engine in [*cached, *self._two(open)]:
            load = engine.tokens
            cost = load + SAVED * (len(tokens) - cached.get(engine, 0))
            if engine.capacity is not None:
                cost += max(0, load + need - engine.capacity)  # for so many tokens it has to wait
            if lowest < 0 or cost < lowest:
                best, lowest = engine, cost
        self._remember(keys, best.incarnation)
        return best.id

    def sent(self, request_id: str, id: EngineId, prompt_tokens: int, max_tokens: int) -> None:
        """The request is `id`'s now; if it was another's before, no longer that one's. `prompt_tokens`: its history."""
        self._forget(request_id)
        request = Booked(self._engines[id], prompt_tokens, self._expected(max_tokens))
        engine = request.engine
        engine.requests[request_id] = self._requests[request_id] = request
        engine.unbegun += 1
        engine.coming += prompt_tokens
        engine.ahead += request.ahead
        self._usual_prompt += WEIGHT * (prompt_tokens - self._usual_prompt)

    def progressed(self, request_id: str, new_tokens: int) -> None:
        """So many more tokens came from it. Unknown ids are ignored."""
        request = self._requests.get(request_id)
        if request is None:
            return
        if not request.begun:
            self._begin(request, True)
        engine = request.engine
        request.tokens += new_tokens
        engine.held += new_tokens
        if request.ahead:
            expected = min(new_tokens, request.ahead)
            request.ahead -= expected
            engine.ahead -= expected

    def ended(self, request_id: str) -> None:
        """It finished, failed or was cancelled. Unknown ids are ignored."""
        request = self._forget(request_id)
        if request is not None and request.begun:
            self._usual_output += WEIGHT * (request.tokens - self._usual_output)

    def snapshot(self, id: EngineId, stats: EngineStats) -> None:
        """What the engine itself says. Ignored are unknown ids, the last words of one that left, and engines that are
        down: what they hold is gone."""
        engine = self._engines.get(id)
        if engine is None or not engine.up:
            return
        engine.skew = 0 if engine.capacity is None else round(stats.kv_usage * engine.capacity) - engine.held
        others = stats.waiting - engine.unbegun  # requests of other front ends
        if others > 0:
            engine.skew += round(others * self._usual_prompt)

    def coming(self, kind: str) -> int:
        """Tokens of prompts that an open engine of this kind still has to compute: the fewer of two that are drawn."""
        open = self._open.get(kind)
        return min(engine.coming for engine in self._two(open)) if open else 0

    def cached(self, tokens: Sequence[int], salt: str, kind: str) -> int:
        """Tokens of this history that an open engine of this kind may have."""
        return max(self._cached(prefix_keys(tokens, salt), kind).values(), default=0)

    # -- to look at

    def __contains__(self, id: EngineId) -> bool:
        return id in self._engines

    def requests(self, id: EngineId) -> list[str]:
        """Those open there, oldest first."""
        return list(self._engines[id].requests)

    def loads(self) -> dict[EngineId, int]:
        """Tokens, by engine."""
        return {id: engine.tokens for id, engine in self._engines.items()}

    # -- inside

    def _expected(self, max_tokens: int) -> int:
        """Output tokens: most requests end long before what they may have."""
        return min(max_tokens, round(self._usual_output))

    def _two(self, open: list[EngineLoad]) -> list[EngineLoad]:
        """Two different ones, or the only one."""
        count = len(open)
        if count == 1:
            return [open[0]]
        bits = draw(self._seed, self._draws)
        self._draws += 1
        first = (bits >> 32) % count
        second = (first + 1 + (bits & 0xFFFFFFFF) % (count - 1)) % count
        return [open[first], open[second]]

    def _cached(self, keys: list[int], kind: str = "") -> dict[EngineLoad, int]:
        """Open engines of this kind that hold a prefix, and how many tokens of it. A block is never held without those
        before."""
        found: dict[EngineLoad, int] = {}
        for i, key in enumerate(keys):
            holders = self._holders.get(key)
            if holders is None:
                break
            for incarnation in holders:
                engine = self._alive.get(incarnation)
                if engine is not None and engine.place >= 0 and engine.kind == kind:
                    found[engine] = (i + 1) * BLOCK
        return found

    def _remember(self, keys: list[int], incarnation: int) -> None:
        holders = self._holders
        for key in reversed(keys):  # the end of a history is forgotten before its start
            others = holders.get(key, ())
            if not others or others[0] != incarnation:
                others = tuple(other for other in others if other != incarnation)
                holders[key] = (incarnation, *others[: HOLDERS - 1])
            holders.move_to_end(key)
        while len(holders) > self._memory:
            holders.popitem(last=False)

    def _forget(self, request_id: str) -> Booked | None:
        request = self._requests.pop(request_id, None)
        if request is not None:
            engine = request.engine
            del engine.requests[request_id]
            if request.begun:
                engine.held -= request.prompt + request.tokens
            else:
                engine.unbegun -= 1
                engine.coming -= request.prompt
            engine.ahead -= request.ahead
        return request

    def _begin(self, request: Booked, begun: bool) -> None:
        """Its prompt was computed; or (False) has to be again, with the tokens that came."""
        engine, sign = request.engine, 1 if begun else -1
        if not begun:
            request.prompt, request.tokens = request.prompt + request.tokens, 0
        request.begun = begun
        engine.unbegun -= sign
        engine.held += sign * request.prompt
        engine.coming -= sign * request.prompt

    def _reborn(self, engine: EngineLoad) -> None:
        """Its KV is empty: whatever is remembered of it names another incarnation."""
        self._alive.pop(engine.incarnation, None)
        self._incarnations += 1
        engine.incarnation = self._incarnations
        self._alive[engine.incarnation] = engine

    def _settle(self, engine: EngineLoad) -> None:
        """In or out of `_open`; the last one takes the place of one that goes."""
        wanted, open = engine.up and not engine.draining, self._open.setdefault(engine.kind, [])
        if wanted and engine.place < 0:
            engine.place = len(open)
            open.append(engine)
        elif not wanted and engine.place >= 0:
            last = open.pop()
            if last is not engine:
                open[engine.place] = last
                last.place = engine.place
            engine.place = -1
