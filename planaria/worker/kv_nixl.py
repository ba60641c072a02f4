"""Bytes of KV blocks by NIXL (github.com/ai-dynamo/nixl, the package `nixl`): read from the memory of who offers them,
by whatever its back ends have (UCX: shared memory, TCP, RDMA). What is asked for, leases and seals go over
planaria.worker.kv_offers as without it, so a block that was read while its place was given to another has no seal that
fits.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import numpy as np

logger = logging.getLogger("planaria.worker")

PATIENCE = 2.0  # seconds that one block is read
NAP = 20e-6


class NixlError(Exception):
    """What NIXL can't do, in its words."""


class NixlAgent:
    """One of NIXL's, with `count` places of `size` bytes that it may read from, or read into. Raises NixlError. Not of
    several threads at once."""

    def __init__(self, backends: Sequence[str], size: int, count: int) -> None:
        self.size, self.count = size, count
        self._memory = mmap.mmap(-1, max(1, size * count))
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self.address = int(self._bytes.ctypes.data)
        try:
            from nixl._api import nixl_agent, nixl_agent_config

            # without a thread of its own: that would never sleep
            config = nixl_agent_config(enable_prog_thread=False, backends=list(backends))
            self._agent: Any = nixl_agent(f"planaria-{uuid4().hex}", config)
            if lacking := [name for name in backends if name not in self._agent.backends]:
                raise NixlError(f"NIXL has no back end {lacking[0]}: {', '.join(self._agent.get_plugin_list())}")
            self._agent.register_memory([(self.address, len(self._bytes), 0, "")], "DRAM")
            self.metadata = bytes(self._agent.get_agent_metadata())
        except NixlError:
            raise
        except Exception as e:  # its own kinds come with its binary
            raise NixlError(f"{type(e).__name__}: {e}") from None
        self._others: dict[bytes, str | bytes] = {}  # names of others, by their metadata

    def progress(self) -> None:
        """What others wait for: to be called as long as any of them may read."""
        self._agent.get_new_notifs()

    def close(self) -> None:
        """Before its memory goes."""
        self._agent = None

    def place(self, index: int) -> memoryview:
        return memoryview(self._memory)[index * self.size : (index + 1) * self.size]

    def read(self, metadata: bytes, address: int, size: int) -> memoryview:
        """So many bytes of another's memory, in the first place. Raises NixlError, after which this agent is of no more
        use: what it began may still write there."""
        try:
            if metadata not in self._others:
                for name in self._others.values():
                    self._agent.remove_remote_agent(name)
                self._others = {metadata: self._agent.add_remote_agent(metadata)}
            into = self._agent.get_xfer_descs([(self.address, size, 0)], "DRAM")
            source = self._agent.get_xfer_descs([(address, size, 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", into, source, self._others[metadata], b"")
            state, until = self._agent.transfer(handle), time.monotonic() + PATIENCE
            while state == "PROC" and time.monotonic() < until:
                time.sleep(NAP)
                state = self._agent.check_xfer_state(handle)
            if state != "DONE":
                raise NixlError("nothing came in time" if state == "PROC" else f"the read ended as {state}")
            self._agent.release_xfer_handle(handle)
        except NixlError:
            raise
        except Exception as e:
            raise NixlError(f"{type(e).__name__}: {e}") from None
        return memoryview(self._memory)[:size]


def check(backends: Sequence[str]) -> None:
    """Can there be agents? The first one of a process takes half a second. Raises NixlError."""
    NixlAgent(backends, 1, 1).close()


class NixlPlaces:
    """Of an agent, for what others will read."""

    def __init__(self, agent: NixlAgent) -> None:
        self.agent = agent
        self._free = list(range(agent.count - 1, -1, -1))

    def put(self, payload: bytearray) -> int | None:
        """Its address. None: there is no room."""
        if not self._free:
            return None
        index = self._free.pop()
        self.agent.place(index)[: len(payload)] = payload
        return self.agent.address + index * self.agent.size

    def drop(self, address: int) -> None:
        self._free.append((address - self.agent.address) // self.agent.size)
