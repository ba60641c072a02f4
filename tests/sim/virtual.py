"""An event loop on the virtual clock: time passes only while nothing is ready to run, and then straight to what is due
next, in the loop or in the world.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

from planaria.server import (
    dispatcher,
    engine,
    engine_client,
    faults,
    fleet,
    fleet_resize,
    health,
    journal,
    keeper,
    response_run,
    response_store,
    service,
)
from tests.sim.world import Violation, World

CLOCKED: tuple[ModuleType, ...] = (
    dispatcher, engine, engine_client, faults, fleet, fleet_resize, health, journal, keeper, response_run,
    response_store, service,
)  # fmt: skip

LAST = 1000.0  # seconds, virtual ones


class _Selector:
    def __init__(self, world: World) -> None:
        self.world = world

    def select(self, timeout: float | None) -> list[Any]:
        world = self.world
        if timeout == 0:
            return []
        if world.violation is not None:
            raise world.violation
        if timeout is None and not world.pending:
            raise Violation("ends", "everybody waits, and nothing will ever happen")
        world.step(world.now + (timeout if timeout is not None else 1e9))
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """What no task catches ends the run, and so does a Violation that somebody did catch."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self._selector = _Selector(world)
        self.set_exception_handler(self._uncaught)

    def time(self) -> float:
        return self.world.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """What a thread does takes no time."""
        done = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as e:
            done.set_exception(e)
        return done

    def _process_events(self, event_list: list[Any]) -> None: ...

    def _write_to_self(self) -> None: ...

    def _uncaught(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if self.world.violation is None:
            self.world.violation = Violation("crash", f"{context['message']}: {type(error).__name__}: {error}")


@contextmanager
def on_clock(world: World) -> Iterator[VirtualLoop]:
    """A loop; the server's modules read this world's clock while it is open."""
    loop = VirtualLoop(world)
    clock = SimpleNamespace(monotonic=world.clock, time=world.clock)
    with ExitStack() as stack:
        for module in CLOCKED:
            if hasattr(module, "time"):
                stack.enter_context(patch.object(module, "time", clock))
        try:
            yield loop
        finally:
            _end(loop)


def _end(loop: VirtualLoop) -> None:
    """What is still going on, after a violation, ends here."""
    loop.world.violation = None
    loop.set_exception_handler(lambda loop, context: None)
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=LAST))
    loop.close()
