"""A rank's packed weights in memory of the node, where its boot names some: written if nobody has before, else mapped.

Rule: what is mapped can only be read, also by who wrote it, and each thing that is taken from it is one that was asked
for. What isn't is read from the checkpoint, into this process's own memory. Experts that travel are always in that.
On a device the bytes are its keeper's (device_weights), and the part in the node's memory has the manifest alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from planaria.checkpoint.identity import weights_version
from planaria.config.digest import packing_fields
from planaria.executor.boot import RankBoot
from planaria.hosts.weights import DIGEST_BYTES, UnwrittenPart, WeightsMemory, WrittenPart, under
from planaria.node import ProcessGone, home
from planaria.worker.device import keepers_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from planaria.kernels.cpu.ops import CpuOps
    from planaria.kernels.ops import Ops
    from planaria.layers.decoder import Model
    from planaria.worker.device_weights import DeviceWriting
    from planaria.worker.parts import Part

FORM = 1  # of manifests

logger = logging.getLogger("planaria.worker")

Heard = Callable[[float], None]  # a fraction of what there is to read
Build = Callable[["Writing | DeviceWriting | Mapped | None", Heard], "Model"]


class Written(msgspec.Struct, frozen=True, array_like=True):
    """Of a manifest: what was asked for, what there is (one thing, or several), its bytes as the loader counts them."""

    key: str
    single: bool
    things: tuple[Any, ...]
    num_bytes: int


class Writing:
    """Packings that go into a part. See `layers.weights.Packings`, `kernels.ops.PartMemory`."""

    whole = False

    def __init__(self, part: UnwrittenPart, ops: CpuOps) -> None:
        self.part, self.ops = part, ops
        self.manifest: list[Written] = []
        self._offsets: dict[int, int] = {}  # by address

    def thing(self, key: str, make: Callable[[], tuple[Any, int]]) -> tuple[Any, int]:
        from planaria.kernels.cpu.placed import placed

        self.ops.part = self
        try:
            thing, num_bytes = make()
        finally:
            self.ops.part = None
        things = thing if isinstance(thing, tuple) else (thing,)
        where = tuple(placed(each, self._offsets.__getitem__) for each in things)
        self.manifest.append(Written(key, not isinstance(thing, tuple), where, num_bytes))
        return thing, num_bytes

    def take(self, size: int) -> npt.NDArray[np.uint8]:
        import numpy as np

        offset, room = self.part.take(max(size, 1))
        array = np.frombuffer(room, np.uint8)
        self._offsets[int(array.ctypes.data)] = offset
        return array[:size]

    def done(self) -> WrittenPart:
        return self.part.done(msgspec.msgpack.encode(self.manifest))


class Mapped:
    """Packings of a part that is there. See `layers.weights.Packings`. found: the thing that is where a manifest says;
    raises ValueError, MsgspecError."""

    whole = True

    def __init__(self, manifest: bytes, found: Callable[[Any], Any]) -> None:
        from planaria.layers.weights import PartDiffers

        self._found, self._differs = found, PartDiffers
        self.num_bytes = 0  # of what was taken
        try:
            self._next = iter(msgspec.msgpack.decode(manifest, type=list[Written]))
        except msgspec.MsgspecError as e:
            raise PartDiffers(f"what is said of it can't be read: {e}") from None

    def thing(self, key: str, make: Callable[[], tuple[Any, int]]) -> tuple[Any, int]:
        written = next(self._next, None)
        if written is None or written.key != key:
            raise self._differs(f"{key} was asked for, there is {written.key if written is not None else 'no more'}")
        try:
            things = tuple(map(self._found, written.things))
        except (ValueError, msgspec.MsgspecError) as e:
            raise self._differs(f"{key}: {e}") from None
        self.num_bytes += written.num_bytes
        return (things[0] if written.single else things), written.num_bytes


def _mapped(part: WrittenPart) -> Mapped:
    import numpy as np

    from planaria.kernels.cpu.placed import PackedAt, found

    memory = np.frombuffer(part.memory, np.uint8)
    return Mapped(part.manifest, lambda at: found(msgspec.convert(at, PackedAt), memory))


class RankWeights:
    """Of one rank, over its epochs."""

    def __init__(self, boot: RankBoot) -> None:
        self.memory: WeightsMemory | None = None
        self._shared: dict[Part, tuple[bytes, int]] = {}  # parts that are mapped: digests, bytes
        self._stale = False  # there may be something that nobody has any more
        self.enter(boot)

    def enter(self, boot: RankBoot) -> None:
        """For another epoch."""
        self.config, self.rank, given = boot.config, boot.rank, boot.memories
        self.keepers = keepers_of(boot)
        kept = self.keepers is not None or self.config.device.kernels == "native"
        shared = given.weights if given.home == home() and kept else None
        if self.memory is not None and self.memory.origin == shared:
            self.memory.keepers = self.keepers
            return
        self.memory = None
        if shared is not None:
            try:
                self.memory = WeightsMemory.of(shared, self.keepers)
            except ProcessGone as e:
                logger.warning("rank %d keeps weights of its own: %s", boot.rank, e)

    def make(self, part: Part, what: str, build: Build, ops: Ops, heard: Heard) -> Model:
        """The model of a part; what: of it, in words, all that isn't in the configuration. In turn with others of the
        node, of this engine or not, where only so many are to read at a time."""
        most = self.config.parallel.max_parallel_loading_workers
        with self.memory.turn(most, heard) if self.memory is not None else nullcontext():
            return self._made(part, what, build, ops, heard)

    def _made(self, part: Part, what: str, build: Build, ops: Ops, heard: Heard) -> Model:
        self._shared.pop(part, None)
        if self.memory is not None:
            from planaria.layers.weights import PartDiffers

            try:
                digest = self._digest(f"{part} {what}", ops)
                if (written := self._written(self.memory, digest, build, ops, heard)) is not None:
                    mapped = _mapped(written) if self.keepers is None else self._on_device(written, digest, ops)
                    model = build(mapped, heard)
                    self._shared[part] = digest, mapped.num_bytes
                    return model
                logger.warning("rank %d keeps weights of its own: who writes shared ones gets nowhere", self.rank)
            except (OSError, PartDiffers) as e:
                logger.warning("rank %d keeps weights of its own: %s", self.rank, e)
        return build(None, heard)

    def _written(
        self, memory: WeightsMemory, digest: bytes, build: Build, ops: Ops, heard: Heard
    ) -> WrittenPart | None:  # fmt: skip
        found = memory.open(digest, heard)
        return self._write(found, digest, build, ops, heard) if isinstance(found, UnwrittenPart) else found

    def _on_device(self, written: WrittenPart, digest: bytes, ops: Ops) -> Mapped:
        from planaria.worker.device_weights import mapped

        assert self.keepers is not None
        return mapped(written, self.keepers, digest, ops)

    def name(self, part: Part, ranks: int) -> None:
        """This is its part now, in a layout of so many ranks."""
        if self.memory is not None:
            digest, _ = self._shared.get(part, (None, 0))
            self.memory.name(self.config.parallel.data_parallel_index, self.rank, ranks, digest)
            self._stale = True

    def leave(self, ranks: int) -> None:
        """No part is its own any more."""
        self._shared.clear()
        if self.memory is not None:
            self.memory.name(self.config.parallel.data_parallel_index, self.rank, ranks, None)
            self.memory.tidy()

    def shared(self, part: Part) -> tuple[int, str]:
        """Bytes of it that are shared, and under which name."""
        digest, num_bytes = self._shared.get(part, (b"", 0))
        return num_bytes, digest.hex()

    def _write(self, part: UnwrittenPart, digest: bytes, build: Build, ops: Ops, heard: Heard) -> WrittenPart:
        def both(fraction: float) -> None:
            part.progress(fraction)
            heard(fraction)

        try:
            writing = self._writing(part, digest, ops)
            build(writing, both)
            return writing.done()
        except BaseException:
            part.abandon()
            if self.keepers is not None:
                self.keepers.drop(under(digest))
            raise

    def _writing(self, part: UnwrittenPart, digest: bytes, ops: Ops) -> Writing | DeviceWriting:
        if self.keepers is None:
            return Writing(part, ops)  # type: ignore[arg-type]  # native
        from planaria.worker.device_weights import DeviceWriting

        return DeviceWriting(part, self.keepers, digest, ops)

    def _digest(self, what: str, ops: Ops) -> bytes:
        """Of all that says what is in a part: the same only for the same bytes."""
        import hashlib

        version = weights_version(self.config.checkpoint["files"])
        own = self.keepers.own if self.keepers is not None else None
        target = repr(ops.target) if own is None else f"{type(ops).__name__} on device {own}"  # type: ignore[attr-defined]
        told = [FORM, what, target, version, sorted(packing_fields(self.config).items())]
        return hashlib.blake2b(msgspec.json.encode(told), digest_size=DIGEST_BYTES).digest()

    def tidy(self) -> None:
        """The layout is in force: what only others had goes, unless somebody has it still."""
        if self.memory is not None and self._stale:
            self.memory.tidy()
            self._stale = False
