"""Weights that a process of this node has written into memory: a sealed memory file in the format of safetensors, and
a handle under which whoever may share that process's memory opens it.

Rule: what isn't sealed is no such file. So what is read is whole and stays as it is, whatever becomes of its writer,
who could have died half way, or have gone on to the next ones.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import sys
import weakref
from collections.abc import Collection, Iterable, Mapping
from io import BufferedReader, FileIO
from typing import Any

from planaria.checkpoint.files import descriptor
from planaria.checkpoint.folder import MAX_HEADER, for_model, safetensors_header
from planaria.checkpoint.spec import Checkpoint, TensorInfo
from planaria.checkpoint.text_part import PREFIXES, text_tensors
from planaria.errors import CapacityError, ModelError
from planaria.node import available_memory, home

Named = Mapping[str, Any] | Iterable[tuple[str, Any]]

SCHEME = "memory:"
ROOM = 8 << 20  # bytes before the first tensor: what there is of them is known at the end
ALIGN = 64
AT_ONCE = 1 << 30  # bytes of one write
FLOATS = ("f64", "f32", "f16", "bf16")  # kinds that may stand for each other
HANDLE = re.compile(r"memory:(\d{1,10})\.(\d{1,10})\.(\d{1,20})@([\x21-\x7e]+)", re.ASCII)

# NumPy's and torch's names -> those of safetensors. NumPy has no bfloat16: it is its bits.
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


class SharedWeights:
    """Tensors under the names that the model's checkpoint has for them, in memory that ranks of this node map. `handle`
    is for `LLM.update_weights` and `/update_weights`, in this or another process; have it until these have answered.

    >>> with SharedWeights(model.state_dict()) as weights:
    ...     httpx.post(url + "/update_weights", json={"handle": weights.handle})

    tensors: NumPy arrays or torch tensors, by name or in pairs, of which one at a time is looked at. Raises ModelError,
    CapacityError.
    """

    def __init__(self, tensors: Named) -> None:
        if sys.platform != "linux":
            raise ModelError("weights are shared through memory files, which need Linux; write a folder, and give that")
        fd = self._own(os.memfd_create("planaria-tensors", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        try:
            _write(fd, tensors.items() if isinstance(tensors, Mapping) else tensors)
            seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except OSError as e:
            self.close()
            raise CapacityError(f"weights can't be put into memory of this node: {e.strerror}") from None
        except BaseException:
            self.close()
            raise

    @classmethod
    def held(cls, handle: str) -> SharedWeights:
        """Those of a handle, which stay from now on though their owner ends. Raises ModelError."""
        found = cls.__new__(cls)
        try:
            found._own(_open(handle))
        except OSError as e:
            raise ModelError(f"{_short(handle)}: {e.strerror}") from None
        return found

    @classmethod
    def given(cls, fd: int) -> SharedWeights:
        """Those of a descriptor, which it takes, of another process's."""
        found = cls.__new__(cls)
        found._own(fd)
        return found

    def fileno(self) -> int:
        return self._fd

    def _own(self, fd: int) -> int:
        self._fd, self._end = fd, weakref.finalize(self, os.close, fd)
        self.handle = f"{SCHEME}{os.getpid()}.{fd}.{os.fstat(fd).st_ino}@{home()}"
        return fd

    @property
    def num_bytes(self) -> int:
        """Of memory that it takes."""
        return os.fstat(self._fd).st_blocks * 512

    def close(self) -> None:
        """Let go of the memory; it goes when nobody has it any more. Idempotent."""
        self._end()

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def opened(file: str) -> FileIO:
    """One of a checkpoint's files, by its path or handle. Raises OSError."""
    return open(_open(file) if file.startswith(SCHEME) else descriptor(file), "rb", buffering=0)


def _open(handle: str) -> int:
    """A descriptor of one's own. Raises OSError."""
    match = HANDLE.fullmatch(handle)
    if match is None:
        raise OSError(errno.EINVAL, "is no handle of shared weights: take SharedWeights(tensors).handle")
    pid, number, inode, where = match.groups()
    if where != home():
        raise OSError(
            errno.EXDEV,
            "is in the memory of another node, container or user; write a folder that all see, and give that",
        )
    gone = OSError(errno.ENOENT, f"process {pid} shares no such memory any more; share it until this is answered")
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        raise gone from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_ino != int(inode):
            raise gone
        wanted = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & wanted != wanted:
            raise OSError(errno.EPERM, "isn't sealed, so its writer may still write; seal it when it is whole")
    except OSError as e:
        os.close(fd)
        if e.errno == errno.EINVAL:  # only memory files have seals
            raise OSError(errno.EPERM, "is no memory file; take SharedWeights(tensors).handle") from None
        raise
    return fd


def _short(handle: str) -> str:
    return f"{handle.partition('@')[0]!r:.60}"


def _write(fd: int, tensors: Iterable[tuple[str, Any]]) -> None:
    header: dict[str, Any] = {}
    at = ROOM
    for name, tensor in tensors:
        if not isinstance(name, str) or name == "__metadata__":
            raise ModelError(
                f"tensor {name!r:.60}: its name isn't one; give it the name that the checkpoint has for it"
            )
        if name in header:
            raise ModelError(f"tensor {name} is there twice")
        dtype, shape, data = _values(name, tensor)
        at = -(-at // ALIGN) * ALIGN
        if len(data) > available_memory():
            raise CapacityError(f"memory of this node has no room for tensor {name}, of {len(data)} bytes")
        _put(fd, data, at)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at - ROOM, at - ROOM + len(data)]}
        at += len(data)
    if not header:
        raise ModelError("there are no tensors")
    told = json.dumps(header).encode()
    if len(told) > ROOM - 8:
        raise ModelError(f"{len(header)} tensors have names of {len(told)} bytes in all; at most {ROOM - 8}")
    _put(fd, memoryview((ROOM - 8).to_bytes(8, "little") + told.ljust(ROOM - 8)), 0)


def _put(fd: int, data: memoryview, at: int) -> None:
    while len(data):
        count = os.pwrite(fd, data[:AT_ONCE], at)
        data, at = data[count:], at + count


def _values(name: str, tensor: Any) -> tuple[str, list[int], memoryview]:
    """What it is, in the words of safetensors, and its bytes. Raises ModelError."""
    import numpy as np

    shape = list(getattr(tensor, "shape", ()))
    if isinstance(tensor, np.ndarray):
        kind = tensor.dtype.name
    elif type(tensor).__module__.partition(".")[0] == "torch" and hasattr(tensor, "detach"):
        kind = str(tensor.dtype).removeprefix("torch.")
    else:
        raise ModelError(f"tensor {name} is a {type(tensor).__name__}; give NumPy arrays or torch tensors")
    if kind not in DTYPES:
        raise ModelError(f"tensor {name} is of {kind}; known: {', '.join(DTYPES)}")
    array: np.typing.NDArray[Any]
    if isinstance(tensor, np.ndarray):
        array = np.ascontiguousarray(tensor, tensor.dtype.newbyteorder("<")).reshape(-1)
    else:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        array = flat.view(sys.modules["torch"].uint8).numpy()
    return DTYPES[kind], shape, array.view(np.uint8).data


def tensors_for(present: Checkpoint, weights: SharedWeights, optional: Collection[str] = ()) -> tuple[TensorInfo, ...]:
    """What is there, as tensors of the model that a checkpoint is of. optional: names that either may lack. Raises
    ModelError naming what is missing, or is another."""
    place = _short(weights.handle)
    with BufferedReader(opened(weights.handle)) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        head = length.to_bytes(8, "little") + file.read(max(0, min(length, size, MAX_HEADER)))

        def read(tensor: TensorInfo) -> bytes:
            file.seek(tensor.offset)
            return file.read(tensor.nbytes)

        given = safetensors_header(place, head, size, 0)
        if any(tensor.name.startswith(PREFIXES) for tensor in given):
            given = text_tensors(given)
        found = for_model(place, present.config, given, read)
    _compare(place, {t.name: t for t in found}, {t.name: t for t in present.tensors}, optional)
    return tuple(found)


def _compare(
    place: str, found: Mapping[str, TensorInfo], wanted: Mapping[str, TensorInfo], optional: Collection[str]
) -> None:  # fmt: skip
    missing = [name for name in wanted if name not in found and name not in optional]
    unknown = [name for name in found if name not in wanted and name not in optional]
    for names, what in ((missing, "missing"), (unknown, "not of this model")):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            told = f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'} {what}"
            raise ModelError(f"{place}: {told:.400}; give all tensors under the names that the checkpoint has for them")
    for name in wanted.keys() & found.keys():
        there, here = found[name], wanted[name]
        if there.shape != here.shape:
            raise ModelError(f"{place}: tensor {name} has shape {list(there.shape)}, the engine's {list(here.shape)}")
        if there.kind != here.kind and not (there.kind in FLOATS and here.kind in FLOATS):
            raise ModelError(f"{place}: tensor {name} is of {there.kind}, the engine's of {here.kind}")
