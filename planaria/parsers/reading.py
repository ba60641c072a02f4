"""How the texts of one request's answers are taken apart. Pure; the formats are imported when a text comes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from planaria.parsers.found import OutputEvent
    from planaria.parsers.output import OutputParser


class Reading(msgspec.Struct, frozen=True):
    """See OutputParser."""

    calls: str | None
    tools: dict[str, dict[str, Any]]
    reasoning: str | None
    prompt: str
    single: bool

    def events(self, text: str) -> list[OutputEvent]:
        """Of a whole text."""
        parser = self.parser()
        return [*parser.push(text), *parser.finish()]

    def parser(self) -> OutputParser:
        from planaria.parsers.output import OutputParser

        return OutputParser(
            calls=self.calls, tools=self.tools, reasoning=self.reasoning, prompt=self.prompt, single=self.single
        )


def call_id(uid: str, choice: int, index: int, calls: str | None = None, prefix: str = "call_") -> str:
    """Of a call of a request: the same whenever it is asked for. Mistral's templates take nine letters and digits."""
    digest = hashlib.blake2b(f"{uid}/{choice}/{index}".encode(), digest_size=12).hexdigest()
    return digest[:9] if calls == "mistral" else prefix + digest
