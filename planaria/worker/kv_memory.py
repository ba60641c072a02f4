"""KV blocks in memory of the node: as planaria.worker.kv_store has them in files, with the same head and the same seal.

One stretch of memory: what it is of (identity, size of a payload, how many), a head for each slot, the payloads. A
slot's head is written last and taken first, so whoever finds the memory after a process that died there finds whole
blocks and nothing else; what was scribbled over has no seal that fits.
"""

from __future__ import annotations

import mmap
import struct
import threading

from planaria.worker.kv_store import HEAD, MAGIC, StoreError, Uses, head_of, is_whole

ABOUT = struct.Struct("<8s16sQQ24x")
PAGE = 4096
EVICTED = 16  # of all blocks, this part goes when there is no room


def slots_of(most: int, size: int) -> int:
    """How many blocks with `size` bytes of payload there is room for in `most` bytes."""
    return max(0, (most - ABOUT.size - PAGE) // (HEAD.size + size))


class MemoryStore:
    """identity: of what is in this rank's part; size: of its payload. memory: writable, with zeros or with what another
    process of this identity has left."""

    def __init__(self, memory: mmap.mmap, identity: bytes, size: int) -> None:
        self.identity, self.size = identity, size
        count = slots_of(len(memory), size)
        self._memory, self._first = memoryview(memory), -(-(ABOUT.size + count * HEAD.size) // PAGE) * PAGE
        self._lock = threading.Lock()
        self._uses = Uses()
        self._slots: dict[bytes, tuple[int, int]] = {}  # of each key: where it is, and when it was used
        about = ABOUT.pack(MAGIC, identity, size, count)
        if self._memory[: ABOUT.size] == about:
            self._find(count)
        else:
            self._memory[ABOUT.size : self._first] = bytes(self._first - ABOUT.size)
            self._memory[: ABOUT.size] = about
        used = {slot for slot, _ in self._slots.values()}
        self._empty = [slot for slot in range(count - 1, -1, -1) if slot not in used]

    def _head(self, slot: int) -> memoryview:
        at = ABOUT.size + slot * HEAD.size
        return self._memory[at : at + HEAD.size]

    def _payload(self, slot: int) -> memoryview:
        at = self._first + slot * self.size
        return self._memory[at : at + self.size]

    def _find(self, count: int) -> None:
        for slot in range(count):
            magic, key, size, _ = HEAD.unpack(self._head(slot))
            if magic == MAGIC and size == self.size and key not in self._slots:
                self._slots[key] = slot, self._uses.stamp()

    def news(self) -> tuple[set[bytes], set[bytes]]:
        """Nobody else has it."""
        return set(), set()

    def keys(self) -> bytes:
        """Of all blocks, one behind the other."""
        with self._lock:
            return b"".join(self._slots)

    def read(self, key: bytes, into: memoryview) -> None:
        """The payload of a block, into `size` bytes. Raises StoreError."""
        with self._lock:
            slot, _ = self._slots.get(key, (-1, 0))
            if slot < 0:
                raise StoreError("gone", "is not kept any more")
            head = bytes(self._head(slot))
            into[:] = self._payload(slot)
            self._slots[key] = slot, self._uses.stamp()
        if not is_whole(head, self.identity, key, into):
            raise StoreError("damaged", "not what its checksum says")

    def write(self, key: bytes, payload: bytearray) -> list[bytes]:
        """Keep a block, unless it is there. Returns keys that had to go for it."""
        head = head_of(self.identity, key, payload)
        gone: list[bytes] = []
        with self._lock:
            if key in self._slots:
                return gone
            if not self._empty:
                gone = sorted(self._slots, key=lambda key: self._slots[key][1])[: -(-len(self._slots) // EVICTED)]
                for each in gone:
                    self._drop(each)
            slot = self._empty.pop()
            self._payload(slot)[:] = payload
            self._head(slot)[:] = head
            self._slots[key] = slot, self._uses.stamp()
        return gone

    def remove(self, key: bytes) -> None:
        """What is no block any more."""
        with self._lock:
            if key in self._slots:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        slot, _ = self._slots.pop(key)
        self._head(slot)[:] = bytes(HEAD.size)
        self._empty.append(slot)
