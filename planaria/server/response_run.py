"""What runs behind a response: its sequence, whose pieces it writes down. Nobody need be connected to it."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from planaria.server.gate import RequestInfo
from planaria.server.generation import Generation
from planaria.server.inputs import room
from planaria.server.records import Head, Outcome, PieceRecord
from planaria.server.stream import Choices, Piece
from planaria.server.tools import shown_marks
from planaria.types import Delta, FinishReason

if TYPE_CHECKING:
    from planaria.parsers.reading import Reading
    from planaria.server.response_store import Entry, ResponseStore
    from planaria.server.service import Service
    from planaria.wire import Submit

logger = logging.getLogger("planaria.server")

# How its sequence ends, and what OpenAI calls that.
_STATUS = {FinishReason.STOP: "completed", FinishReason.LENGTH: "incomplete"}


class ResponseRun:
    """A `Writer`, though it writes into what is kept. error: why it failed: message, status, code."""

    heavy = False

    def __init__(self, store: ResponseStore, entry: Entry, info: RequestInfo, stream: Choices) -> None:
        self.store, self.entry, self.stream = store, entry, stream
        self.generation = Generation(store.service, info, [stream], stream=True)
        self.generation.writer = self
        self.error: tuple[str, int, str] | None = None
        entry.run = self

    @classmethod
    def again(cls, store: ResponseStore, entry: Entry) -> None:
        """Go on with one of a process that has ended, with the tokens it has."""
        head, kept = entry.kept.head, entry.kept
        why = "it was begun again and again, and nothing came of it" if kept.hopeless else unfit(store, head)
        if not why and (submit := head.submit) is not None:
            stream = choices_of(store.service, submit, head.reading)
            sequence = stream.sequences[0]
            for tokens, weights in zip(kept.tokens, kept.weights, strict=True):
                if tokens:
                    sequence.take(Delta(submit.id, len(sequence.tokens), tokens, weights=weights))
            if sequence.text == "".join(kept.texts) and sequence.finish is None:
                store.append(entry, kept.begin_again())
                cls(store, entry, RequestInfo(head.id, head.uid, "POST", "/v1/responses"), stream).start()
                return
            why = "this server's tokenizer has another text for its tokens"
        store.end(entry, "failed", f"the server began anew and can't go on with it: {why}")

    def start(self) -> None:
        """Run beside what asked for it."""
        self.store.tasks.start(self.go())

    async def go(self) -> None:
        """Until it has ended, whichever way."""
        generation, service = self.generation, self.store.service
        waits = not (self.entry.durable and self.entry.listed and self.store.lasts)  # is it lost with this server?
        if waits:
            service.enter()
        try:
            await generation.start()
            while not (generation.finished or generation.gone or generation.error is not None):
                generation.buffer.clear()
                await generation.wait()
            self._over()
        except Exception:
            logger.exception("%s: internal error", self.entry.kept.head.id)
            self.error = "internal error; the server's log has the details", 500, "internal_error"
            self.store.end(self.entry, "failed", self.error[0])
        finally:
            generation.close()
            self.entry.run = None
            self.entry.wake()
            if waits:
                service.leave()

    def _over(self) -> None:
        generation, service, entry = self.generation, self.store.service, self.entry
        if entry.cut:
            return
        if generation.gone:
            self.store.end(entry, "cancelled")
        elif generation.error is not None:
            if entry.durable and self.store.lasts and (service.draining or service.client.dead is not None):
                self.set_aside()  # another server goes on with it
                return
            self.error = generation.error
            self.store.end(entry, "failed", self.error[0])
        if not generation.gone:
            generation.info.status = generation.info.status or (self.error[1] if self.error else 200)
        generation.log()

    def cancel(self, why: str = "client disconnected") -> None:
        self.generation.leave(why)

    def set_aside(self) -> None:
        """Nothing more comes of it here."""
        self.entry.cut = True
        self.entry.wake()
        self.generation.leave("set aside")

    # -- as a writer

    def event(self, piece: Piece) -> bytes:
        end = None
        if piece.finish is not None:
            stream = self.stream
            cached, service = min(stream.cached_tokens, stream.prompt_tokens), self.store.service
            facts = service.client.facts
            size = facts.block_size if facts is not None and service.client.warm else 0
            full = stream.prompt_tokens // size * size if size else 0
            end = Outcome(
                _STATUS[piece.finish], int(time.time()), "", stream.prompt_tokens, stream.completion_tokens, cached,
                max(0, full - cached),
            )  # fmt: skip
        self.store.record(self.entry, PieceRecord(list(piece.tokens), piece.text, end, piece.weights))
        return b""

    def tail(self) -> bytes:
        return b""

    def failed(self, message: str, status: int, code: str) -> bytes:
        return b""

    def whole(self) -> bytes:
        return b""


def choices_of(service: Service, submit: Submit, reading: Reading | None) -> Choices:
    """Its sequence; of its text what marks calls and reasoning can be seen."""
    tokenizer = service.tokenizer
    if reading is not None and tokenizer is not None:
        tokenizer = tokenizer.showing(shown_marks(reading))
    return Choices(submit.prompt, [submit], tokenizer)


def fits(store: ResponseStore) -> str:
    """The model that is served, as far as another could go on with what it has begun."""
    facts = store.service.client.facts
    return f"{facts.model} {facts.vocab_size} {facts.num_parameters}" if facts is not None else ""


def unfit(store: ResponseStore, head: Head) -> str:
    """Why this server can't go on with it, or ""."""
    facts, submit = store.service.client.facts, head.submit
    if fits(store) != head.fits:
        return f"it serves another model ({fits(store)}, not {head.fits})"
    if facts is None or submit is None:
        return "there is no engine"
    limit = room(facts)
    needed = len(submit.prompt) + submit.max_tokens
    return f"it has room for {limit} tokens, not for {needed}" if needed > limit else ""
