"""Where the processes of an outer launcher meet: the TCP store that it serves, or that rank 0 serves in its place.

The store is open to whoever reaches its port, as every program under such a launcher has it; what is exchanged there
lets processes reach one another and is of no use to anyone once they have met.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

from planaria.errors import CapacityError
from planaria.mesh.comm import CollectiveAborted
from planaria.mesh.gloo import join_store, open_store
from planaria.node import resolve_host
from planaria.topology.outer import OuterLauncher

TIMEOUT = 300.0  # seconds for the store to be there

_engines = itertools.count()  # programs make their engines in the same order
_stores: dict[tuple[str, int], Any] = {}  # one connection, or server, for a program's whole life


class OuterStore:
    """Keys are of this engine and of this attempt of the outer launcher."""

    def __init__(self, outer: OuterLauncher) -> None:
        """Raises CapacityError when there is no store."""
        self.prefix = f"planaria/{outer.attempt}/{outer.replica}/{next(_engines)}/"
        where = outer.master_addr, outer.master_port
        if where not in _stores:
            host, serves = resolve_host(outer.master_addr), outer.rank == outer.replica == 0 and not outer.serves_store
            absent = "" if serves or outer.serves_store else "; RANK 0 serves it, and has not come, or has ended"
            try:
                if serves:
                    _stores[where], _ = open_store(host, outer.master_port, deadline=TIMEOUT)
                else:
                    _stores[where] = join_store(host, outer.master_port, deadline=TIMEOUT)
            except (OSError, CollectiveAborted) as e:
                raise CapacityError(
                    f"the outer launcher's processes can't meet at {outer.master_addr} port {outer.master_port} "
                    f"($MASTER_ADDR, $MASTER_PORT): {e}{absent}"
                ) from None
        self.store = _stores[where]

    def put(self, key: str, value: bytes) -> None:
        self.store.set(self.prefix + key, value)

    def get(self, key: str, timeout: float) -> bytes:
        """Waits for it, once. Raises CapacityError."""
        try:
            self.store.wait([self.prefix + key], timedelta(seconds=timeout))
            found = bytes(self.store.get(self.prefix + key))
        except RuntimeError as e:
            raise CapacityError(f"rank 0 did not come in {timeout:.0f} s: {str(e).splitlines()[0]}") from None
        self.store.delete_key(self.prefix + key)
        return found
