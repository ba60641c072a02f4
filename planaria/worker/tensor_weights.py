"""A part's weights as torch's tensors, in the node's memory; or on a device: its keeper has them in a few allocations,
each mapped by who needs it. What is said of them, and who may write, is in the node's memory as of any part.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from planaria.hosts.device_memory import Keepers
from planaria.hosts.weights import UnwrittenPart, WrittenPart, under
from planaria.kernels.torch_placed import ThingAt, found, moved, seen
from planaria.worker.weights import Mapped, Written

if TYPE_CHECKING:
    from planaria.kernels.ops import Ops

CHUNK = 128 << 20  # bytes of an allocation, at least
ALIGN = 256


class DeviceManifest(msgspec.Struct, frozen=True, array_like=True):
    """starts: of allocations, in the part; size: where the last one ends; things: as of any part."""

    starts: tuple[int, ...]
    size: int
    things: bytes


class TensorWriting:
    """Packings of tensors that go into a part. See `layers.weights.Packings`. Each is made as it would be anyway, and
    then copied: of one thing there is room for two at a time."""

    whole = False

    def __init__(self, part: UnwrittenPart) -> None:
        self.part = part
        self.manifest = list[Written]()

    def thing(self, key: str, make: Callable[[], tuple[Any, int]]) -> tuple[Any, int]:
        thing, num_bytes = make()
        things = thing if isinstance(thing, tuple) else (thing,)
        where, there = zip(*(moved(each, self._take) for each in things), strict=True)
        self.manifest.append(Written(key, not isinstance(thing, tuple), where, num_bytes))
        return (there if isinstance(thing, tuple) else there[0]), num_bytes

    def _take(self, size: int) -> tuple[int, Tensor]:
        at, room = self.part.take(size)
        return at, seen(room, torch.device("cpu"))

    def done(self) -> WrittenPart:
        """Others may read it now."""
        return self.part.done(msgspec.msgpack.encode(self.manifest))


class DeviceWriting(TensorWriting):
    """Where the part has what is said of them alone, and a device's keeper has the bytes."""

    def __init__(self, part: UnwrittenPart, keepers: Keepers, digest: bytes, ops: Ops) -> None:
        super().__init__(part)
        self._keepers, self._under = keepers, under(digest)
        self._device = ops.device  # type: ignore[attr-defined]  # torch
        self._starts, self._room, self._used, self._end = list[int](), Tensor(), 0, 0
        keepers.drop(self._under)  # what somebody left who died

    def _take(self, size: int) -> tuple[int, Tensor]:
        at = -(-self._used // ALIGN) * ALIGN
        if at + size > self._end:
            at, name = self._end, f"{self._under}{len(self._starts)}/"
            self._room = seen(self._keepers.take(name, max(CHUNK, size)), self._device)
            self._starts.append(at)
            self._end = at + self._room.numel()
        self._used, begin = at + size, at - self._starts[-1]
        return at, self._room[begin : begin + size]

    def done(self) -> WrittenPart:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # else it may not be written yet
        things = msgspec.msgpack.encode(self.manifest)
        return self.part.done(msgspec.msgpack.encode(DeviceManifest(tuple(self._starts), self._end, things)))


def mapped_tensors(part: WrittenPart) -> Mapped:
    """Packings of a part that is there, in the node's memory."""
    whole = seen(part.memory, torch.device("cpu"))

    def memory(at: int, size: int) -> Tensor:
        if at + size > whole.numel():
            raise ValueError(f"{size} bytes at {at} are not of the part")
        return whole[at : at + size]

    return Mapped(part.manifest, lambda at: found(msgspec.convert(at, ThingAt), memory))


def mapped(part: WrittenPart, keepers: Keepers, digest: bytes, ops: Ops) -> Mapped:
    """Packings of a part that is there: its lock is held as long as anything of it. Raises PartDiffers, OSError."""
    from planaria.layers.weights import PartDiffers

    device = ops.device  # type: ignore[attr-defined]  # torch
    try:
        manifest = msgspec.msgpack.decode(part.manifest, type=DeviceManifest)
    except msgspec.MsgspecError as e:
        raise PartDiffers(f"what is said of it can't be read: {e}") from None
    rooms = list[Tensor]()
    for number in range(len(manifest.starts)):
        there = keepers.find(f"{under(digest)}{number}/", writable=False, keeps=part)
        if there is None:
            raise PartDiffers("the device's keeper has it no longer")
        rooms.append(seen(there, device))

    def memory(at: int, size: int) -> Tensor:
        number = bisect_right(manifest.starts, at) - 1
        begin = at - manifest.starts[number]
        if number < 0 or begin + size > rooms[number].numel():
            raise ValueError(f"{size} bytes at {at} are not of the part")
        return rooms[number][begin : begin + size]

    return Mapped(manifest.things, lambda at: found(msgspec.convert(at, ThingAt), memory))
