"""Compiles the sampler's kernels, once, and calls them. Numba is only needed where the cache is empty: loading what is
there (objects.py) takes milliseconds and little memory.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from planaria import cache, env
from planaria.kernels.objects import CodeMachine, ensure, object_file

BLOCK = 128  # logits that are looked at, or not, together
FEW = 1024  # tokens that are allowed, whose logits are worth to be gathered
GRAIN = 16  # buckets per power of two
BUCKETS = 41 * GRAIN  # y in [0, 41); beyond it every weight is 0
OK, BROKEN, BANNED = 0, 1, 2

# Argument types: pointers by the letter of what they point to (f float32, d float64, i int32, q int64, Q uint64),
# numbers as int64 (n) and float32 (x).
ENTRIES = {
    "sample_lines": "f i n n n q f q d f Q q f i q q q q q i q i q q q q",
    "logprob_lines": "f i n n n n q f i f q q q",
    "edit_line": "f n n q n q f n q f x x x",
    "sample_allowed": "f i n n n Q f q d f Q q f i q q q q q i q i q q f i q q",
}
Array = npt.NDArray[Any]


class Scratch:
    """What one thread needs besides the logits, for a vocabulary of `size`."""

    def __init__(self, size: int) -> None:
        blocks = -(-size // BLOCK)
        self._tops = np.zeros(blocks, np.float32)  # greatest logit of each block
        arrays: list[Array] = [
            np.zeros(blocks, np.int64),  # kept mass of each block
            np.zeros(BUCKETS + 1, np.int64),  # tokens by bucket
            np.zeros(BUCKETS + 1, np.int64),  # mass by bucket
            np.zeros(256, np.int64),  # tokens by digit
            np.zeros(256, np.int64),  # mass by digit
            np.zeros(BLOCK, np.int32),  # one block's buckets
            np.zeros(BLOCK, np.int64),  # and weights
            np.zeros(size + 1, np.int32),  # one bucket's tokens, with room for a last write
            np.zeros(size, np.int64),  # their keys
            np.zeros(size, np.int64),  # their weights
        ]
        few: list[Array] = [np.zeros(FEW + 64, np.float32), np.zeros(FEW + 64, np.int64)]  # logits and ids
        self.found = np.zeros(2, np.int64)
        self.few = [a.ctypes.data for a in (few[0], *few, self.found)]
        self._arrays = arrays + few
        self.tops = [self._tops.ctypes.data] * 2
        self.addresses = self.tops + [a.ctypes.data for a in arrays]


class SamplingKernels:
    """The compiled functions, for contiguous logits in main memory [S, size]. They run without the interpreter lock."""

    def __init__(self, code: bytes) -> None:
        self._engine = CodeMachine().load(code)
        number: dict[str, type[Any]] = {"n": ctypes.c_int64, "x": ctypes.c_float}
        self._functions: dict[str, Callable[..., None]] = {}
        for name, kinds in ENTRIES.items():
            arguments: list[type[Any]] = [number.get(kind, ctypes.c_void_p) for kind in kinds.split()]
            address = self._engine.get_function_address(f"planaria_{name}")
            self._functions[name] = ctypes.CFUNCTYPE(None, *arguments)(address)

    def sample(
        self, logits: Array, begin: int, end: int, scratch: Scratch, settings: list[int], out: list[int]
    ) -> None:
        """`sample_lines`; `settings` are the addresses from `rows` to `positions`, `out` of tokens and flags."""
        address = logits.ctypes.data
        self._functions["sample_lines"](
            address, address, logits.shape[1], begin, end, *settings, *scratch.addresses, *out
        )

    def logprobs(
        self, logits: Array, begin: int, end: int, k: int, targets: Array, scratch: Scratch, out: list[int]
    ) -> None:
        """`logprob_lines`; `out` are the addresses of greatest, masses, ranks and best."""
        address = logits.ctypes.data
        self._functions["logprob_lines"](
            address, address, logits.shape[1], begin, end, k, targets.ctypes.data, *scratch.tops, *out
        )

    def edit(
        self, logits: Array, line: int, bans: Array, bias_ids: Array, biases: Array, seen: Array, counts: Array,
        repetition: float, frequency: float, presence: float,
    ) -> None:  # fmt: skip
        """`edit_line` of one line: ids int64, biases and counts float32."""
        self._functions["edit_line"](
            logits.ctypes.data, line * logits.shape[1], len(bans), bans.ctypes.data, len(bias_ids),
            bias_ids.ctypes.data, biases.ctypes.data, len(seen), seen.ctypes.data, counts.ctypes.data,
            repetition, frequency, presence,
        )  # fmt: skip

    def allowed(
        self, address: int, size: int, line: int, row: int, allowed: int, settings: list[int], scratch: Scratch
    ) -> list[int]:
        """`sample_allowed` of a line of the logits at `address`, [S, size]: a token and a flag. `allowed`: the address
        of words of 64 bits, one for each logit; `settings`: those from `scales` to `positions`."""
        self._functions["sample_allowed"](
            address, address, size, line, row, allowed, *settings, *scratch.addresses, *scratch.few
        )
        found: list[int] = scratch.found.tolist()
        return found


_lock = threading.Lock()
_loaded: dict[Path, SamplingKernels] = {}


def load(cache_dir: Path | None = None, *, aside: bool = False) -> SamplingKernels:
    """The library, loaded into this process once. `aside`: when it must be compiled, do it in a process of its own,
    which takes neither this one's interpreter lock nor its memory."""
    folder = cache_dir or env.cache_dir() / "kernels"
    with _lock:
        if folder not in _loaded:
            path = cache_file(folder)
            if aside and sys.executable and not cache.kept_file(path):
                command = [sys.executable, "-m", "planaria.kernels.sampling_library", str(folder)]
                subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
            _loaded[folder] = SamplingKernels(ensure(path, compile_object))
        return _loaded[folder]


def cache_file(folder: Path) -> Path:
    """Where the object code for these sources, this compiler and this CPU is or would be."""
    sources = [Path(__file__).parent / f"{name}.py" for name in ("sampling_library", "cpu_sampling")]
    return object_file(folder, "sampling", sources, (version("numba"), *CodeMachine().facts))


def compile_object() -> bytes:
    """Object code with the C functions `planaria_` + each of ENTRIES. Takes seconds."""
    from numba import cfunc, types

    from planaria.kernels import cpu_sampling

    kinds: dict[str, Any] = {"n": types.int64, "x": types.float32}
    pointees = {"f": types.float32, "d": types.float64, "i": types.int32, "q": types.int64, "Q": types.uint64}
    pointer: Any = types.CPointer
    kinds |= {letter: pointer(pointee) for letter, pointee in pointees.items()}
    machine, module = CodeMachine(), None
    for name, arguments in ENTRIES.items():
        signature = types.void(*[kinds[kind] for kind in arguments.split()])
        compiled = cfunc(signature, error_model="numpy")(cpu_sampling.FUNCTIONS[name])
        part = machine.binding.parse_assembly(compiled.inspect_llvm().replace(compiled.native_name, f"planaria_{name}"))
        if module is None:
            module = part
        else:
            module.link_in(part)
    assert module is not None
    for function in module.functions:  # alone with their callers, functions turn out to raise nothing
        if not function.is_declaration and not function.name.startswith("planaria_"):
            function.linkage = "internal"
    code = machine.emit(module)
    missing = [f.name for f in module.functions if f.is_declaration and not f.name.startswith("llvm.")]
    if missing:  # loading would end the process
        raise RuntimeError(f"the sampling kernels need {', '.join(missing)} from outside")
    return code


if __name__ == "__main__":
    ensure(cache_file(Path(sys.argv[1])), compile_object)
