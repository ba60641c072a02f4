"""Work beside what waits for it: held until it is done, since an event loop alone would let go of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any


class Background:
    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[Any]] = set()

    def start(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


async def in_thread(act: Callable[[], object]) -> None:
    """Carry out something short, of an end: in a thread, so that others have their turn meanwhile, or here where none
    can be started any more."""
    try:
        done = asyncio.get_running_loop().run_in_executor(None, act)
    except RuntimeError:
        act()
    else:
        await done
