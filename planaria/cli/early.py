"""What `planaria serve` does before it imports what is its own: engines' processes are forked from one that has
imported theirs, which begins as a copy of this one, with what both need, and needs no option for that."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from importlib import import_module

from planaria import preload
from planaria.hosts import forkserver
from planaria.processes import few_addresses, raise_descriptor_limit


@contextlib.contextmanager
def begun() -> Iterator[None]:
    """For the main thread. What nobody asks for until it ends, ends with it. Nothing, where no server can be."""
    if few_addresses():
        yield
        return
    raise_descriptor_limit()
    with preload.importing():
        for module in preload.OF_BOTH:
            import_module(module)
    forkserver.begin(preload.before_it_is_known())
    from planaria.config.machine import present_platform

    try:
        if not present_platform().on_host:
            forkserver.let_go()
        yield
    finally:
        forkserver.let_go()
