"""Mistakes with adapters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from planaria.core.kv_cache import KeyScope
from planaria.core.loras import LoraSlots
from planaria.executor.loras import LoraStore
from planaria.types import Request

ROOT = KeyScope.root


@contextmanager
def leave_the_adapter_out() -> Iterator[None]:
    """Of the keys of blocks."""

    def root(self: KeyScope, salt: str = "", adapter: str = "") -> bytes:
        return ROOT(self, salt)

    with patch.object(KeyScope, "root", root):
        yield


@contextmanager
def give_away_a_slot_in_use() -> Iterator[None]:
    """Nobody is counted as a user."""
    with (
        patch.object(LoraSlots, "enter", lambda self, digest: None),
        patch.object(LoraSlots, "leave", lambda self, digest: None),
    ):
        yield


@contextmanager
def believe_that_new_ranks_have_adapters() -> Iterator[None]:
    """What was in slots before a loss is there still."""

    def lost(self: LoraSlots) -> None:
        self.users.clear()
        self.wanted = ""

    with patch.object(LoraSlots, "lost", lost):
        yield


@contextmanager
def enter_before_the_last_part() -> Iterator[None]:
    place = LoraStore.place

    def early(self: LoraStore, core: Any) -> None:
        wanted = core.loras.wanted
        place(self, core)
        if wanted and core.loras.wanted:
            core.loras.placed()

    with patch.object(LoraStore, "place", early):
        yield


@contextmanager
def drop_what_is_unloaded() -> Iterator[None]:
    """At once, whoever has it."""
    hear = LoraStore.hear

    def drop(self: LoraStore, message: Any, core: Any) -> Any:
        found = hear(self, message, core)
        for digest in list(self.unloaded):
            self.unloaded.pop(digest)
            self.complete.pop(digest)
        return found

    with patch.object(LoraStore, "hear", drop):
        yield


@contextmanager
def starve_who_waits() -> Iterator[None]:
    """Who comes after somebody that waits for a slot takes one that is free for it."""
    with patch.object(LoraSlots, "want", lambda self, digest: None):
        yield


@contextmanager
def forget_the_adapter() -> Iterator[None]:
    """Of a request that another engine, or another epoch, goes on with."""
    lost = LoraSlots.lost
    made: list[Request] = []

    def init(self: Request, *args: Any, **more: Any) -> None:
        INIT(self, *args, **more)
        made.append(self)

    def forget(self: LoraSlots) -> None:
        lost(self)
        for request in made:
            request.adapter = ""

    with patch.object(Request, "__init__", init), patch.object(LoraSlots, "lost", forget):
        yield


INIT = Request.__init__
