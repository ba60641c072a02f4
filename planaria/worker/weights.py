"""A rank's packed weights in memory of the node, where its boot names some: written if nobody has before, else mapped.

Rule: what is mapped can only be read, also by who wrote it, and each thing that is taken from it is one that was asked
for. What isn't is read from the checkpoint, into this process's own memory. Experts that travel are always in that.
Tensors are in tensor_weights; on a device their bytes are its keeper's, and the part has the manifest alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from planaria.checkpoint.identity import weights_version
from planaria.config.digest import packing_fields
from planaria.errors import PlanariaError
from planaria.executor.boot import RankBoot
from planaria.hosts.weights import DIGEST_BYTES, NUM_NAMES, UnwrittenPart, WeightsMemory, WrittenPart, under
from planaria.node import ProcessGone, home
from planaria.worker.device import free_bytes, keepers_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from planaria.kernels.cpu.ops import CpuOps
    from planaria.kernels.ops import Ops
    from planaria.layers.decoder import Model
    from planaria.layers.weights import Packings
    from planaria.worker.parts import Part
    from planaria.worker.tensor_weights import TensorWriting

FORM = 1  # of manifests
LEFT = 1 << 30  # bytes of a device that who prepares weights leaves to ranks

logger = logging.getLogger("planaria.worker")

Heard = Callable[[float], None]  # a fraction of what there is to read
Build = Callable[["Packings | None", Heard], "Model"]


class NotPrepared(PlanariaError):
    """Who prepares weights can't put them where ranks would find them."""


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
        self.config, self.rank, self._beside, given = boot.config, boot.rank, bool(boot.beside), boot.memories
        self.keepers = keepers_of(boot)
        kept = self.keepers is not None or self.config.device.platform.on_host
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

    def make_apart(self, part: Part, what: str, build: Build, ops: Ops) -> Model:
        """What a rank has in memory of its own: experts that a part's lanes have otherwise, Transformers' tensors. Who
        prepares weights beside this rank packs them into the node's memory; it maps them then."""
        if self._beside:
            return self.make(part, what, build, ops, lambda fraction: None)
        return self._found(part, what, build, ops) or build(None, lambda fraction: None)

    def _found(self, part: Part, what: str, build: Build, ops: Ops) -> Model | None:
        """Has somebody packed what weights that came later have here?"""
        if self.memory is None or not self.config.weights_number:
            return None
        from planaria.layers.weights import PartDiffers

        try:
            digest = self._digest(f"{part} {what}", ops)
            found = self.memory.open(digest)
            if isinstance(found, WrittenPart):
                return build(self._packings(found, digest, ops), lambda fraction: None)
            if found is not None:
                found.abandon()
        except (OSError, PartDiffers) as e:
            logger.warning("rank %d reads what was packed beside it: %s", self.rank, e)
        return None

    def _made(self, part: Part, what: str, build: Build, ops: Ops, heard: Heard) -> Model:
        self._shared.pop(part, None)
        if self.memory is not None:
            from planaria.layers.weights import PartDiffers

            try:
                digest = self._digest(f"{part} {what}", ops)
                if (written := self._written(self.memory, digest, build, ops, heard)) is not None:
                    mapped = self._packings(written, digest, ops)
                    model = build(mapped, heard)
                    self._shared[part] = digest, mapped.num_bytes
                    return model
                logger.warning("rank %d keeps weights of its own: who writes shared ones gets nowhere", self.rank)
            except (OSError, PartDiffers) as e:
                if self.keepers is not None and self._beside:
                    raise NotPrepared(str(e)) from None
                logger.warning("rank %d keeps weights of its own: %s", self.rank, e)
        return build(None, heard)

    def _written(
        self, memory: WeightsMemory, digest: bytes, build: Build, ops: Ops, heard: Heard
    ) -> WrittenPart | None:  # fmt: skip
        if isinstance(found := memory.open(digest, heard), WrittenPart | None):
            return found
        try:
            return self._write(found, digest, build, ops, heard)
        except OSError:
            if self.keepers is None or self._beside or not self.config.weights_number:
                raise
            self.leave(NUM_NAMES)  # those of before, which are named still: there is no room for both
            again = memory.open(digest, heard)
            return self._write(again, digest, build, ops, heard) if isinstance(again, UnwrittenPart) else again

    def _room_on_device(self) -> None:
        """Raises OSError where who prepares weights would take from running ranks what they compute with."""
        if self.keepers is None or not self._beside:
            return
        before, free = sum(self.keepers.held("weights/").values()), free_bytes(self.config)
        if free < before + LEFT:
            raise OSError(f"{free / 2**30:.1f} GiB are free on the device, those in force take {before / 2**30:.1f}")

    def _packings(self, written: WrittenPart, digest: bytes, ops: Ops) -> Mapped:
        if self.keepers is None and self._native:
            return _mapped(written)
        from planaria.worker.tensor_weights import mapped, mapped_tensors

        return mapped_tensors(written) if self.keepers is None else mapped(written, self.keepers, digest, ops)

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
            self._room_on_device()
            writing = self._writing(part, digest, ops)
            build(writing, both)
            return writing.done()
        except BaseException:
            part.abandon()
            if self.keepers is not None:
                self.keepers.drop(under(digest))
            raise

    def _writing(self, part: UnwrittenPart, digest: bytes, ops: Ops) -> Writing | TensorWriting:
        if self.keepers is None and self._native:
            return Writing(part, ops)  # type: ignore[arg-type]
        from planaria.worker.tensor_weights import DeviceWriting, TensorWriting

        return TensorWriting(part) if self.keepers is None else DeviceWriting(part, self.keepers, digest, ops)

    @property
    def _native(self) -> bool:
        return self.config.device.kernels == "native"

    def _digest(self, what: str, ops: Ops) -> bytes:
        """Of all that says what is in a part: the same only for the same bytes."""
        import hashlib

        version = weights_version(self.config.checkpoint["files"])
        own = self.keepers.own if self.keepers is not None else None
        target = repr(ops.target) if self._native else f"{type(ops).__name__} on device {own}"  # type: ignore[attr-defined]
        told = [FORM, what, target, version, sorted(packing_fields(self.config).items())]
        return hashlib.blake2b(msgspec.json.encode(told), digest_size=DIGEST_BYTES).digest()

    def tidy(self) -> None:
        """The layout is in force: what only others had goes, unless somebody has it still."""
        if self.memory is not None and self._stale:
            self.memory.tidy()
            self._stale = False
