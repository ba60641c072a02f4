"""Compiles the kernels and the interpreter of a tape for a target, once, and loads them; those of a packed kind apart,
when they are first asked for: a file has two or three kinds of twelve. The object code is kept (objects.py) under a
hash of these sources, the compiler's versions and the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from planaria import env
from planaria.kernels import objects
from planaria.kernels.blocks import KINDS
from planaria.kernels.cpu import amx, fields, layout, micro
from planaria.kernels.cpu.fields import Operation
from planaria.kernels.cpu.target import ISAS, Target
from planaria.kernels.objects import CodeMachine, initialise, object_file

# The interpreter, in reading order.
PROGRAM = ("collective", "threads", "striped", "products", "grouped", "lora", "mla", "program")
SOURCES = (
    *PROGRAM, "../blocks", "../objects", "activations", "amx", "build", "codes", "compiler", "emit", "expert_kernels",
    "fields", "layout", "micro", "mla_values", "native", "packed", "rounded", "superblocks", "target", "twofold",
    "unpack", "vector",
)  # fmt: skip
EXTERNAL = ("syscall", "memcpy", "memset", "memmove")  # all that object code calls outside itself
EntryPoint = Any  # a C function (control block, thread) -> None, called without the interpreter lock

_lock = threading.Lock()
_beside: list[subprocess.Popen[bytes]] = []  # see compile_beside
_loaded: dict[tuple[Target, str], Any] = {}
_of_number = {kind.number: name for name, kind in KINDS.items()}


class KindKernels(NamedTuple):
    """table: addresses of packed.ENTRIES, bytes of a rounded block, packed.few_rows. place: brings codes into panels
    (codes.place), called without the interpreter lock."""

    table: npt.NDArray[np.int64]
    place: Callable[..., None]


def host_isa() -> str:
    """The highest of ISAS that this CPU and operating system offer."""
    has = initialise().get_host_cpu_features()
    wide = all(has.get(name) for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq"))
    if wide and has.get("avx512bf16"):
        tiled = has.get("amx-tile") and has.get("amx-bf16") and amx.allowed()
        return "amx" if tiled else "avx512_bf16"
    return "avx512" if wide else "generic"


def _machine(target: Target) -> CodeMachine:
    cpu = ""
    if target.isa != host_isa() and "x86" in initialise().get_process_triple():
        cpu = {"avx512_bf16": "cooperlake", "avx512": "x86-64-v4", "generic": "x86-64-v3"}[target.isa]
    return CodeMachine(cpu)


def operate(functions: dict[str, Any]) -> str:
    """Source of `native.operate`. The function of a kind of rows is named after its class in fields.py: MlaStoreOp's is
    op_mla_store; it takes those of the arguments that it names."""
    lines = ["def operate(c, row, tid, ticket):", "    code = get(row, 0)"]
    for kind in vars(fields).values():
        if isinstance(kind, type) and issubclass(kind, Operation) and kind not in (Operation, fields.ExchangeOp):
            name = "op" + re.sub("([A-Z])", r"_\1", kind.__name__.removesuffix("Op")).lower()
            given = ", ".join(inspect.signature(functions[name]).parameters)
            lines += [f"    if code == {kind.code}:", f"        {name}({given})"]
            if "port" in kind.words():  # nobody comes: what follows would be computed of garbage
                lines += [f"        if atomic_get(get(row, {kind.words()['port']}), {layout.PORT_FAILED}):",
                          f"            atomic_put(c, {layout.OVER}, 1)"]  # fmt: skip
            lines += ["        return"]
    return "\n".join(lines)


def _program(target: Target) -> str:
    """IR of the interpreter."""
    from planaria.kernels.cpu import native
    from planaria.kernels.cpu.compiler import PRIMITIVES, Module

    kernels = {
        f"pl_{name}": ("void" if "None" in str(value.__annotations__["return"]) else "i64", value.__code__.co_argcount)
        for name, value in vars(native).items()
        if isinstance(value, FunctionType) and name not in PRIMITIVES
    }
    folder = Path(__file__).parent
    source = "\n".join((folder / f"{name}.py").read_text(encoding="utf-8") for name in PROGRAM)
    source = source.replace("from __future__ import annotations\n", "")  # allowed at the top of a file only
    names: dict[str, Any] = {}
    for name in PROGRAM:
        names |= vars(import_module(f"planaria.kernels.cpu.{name}"))
    return Module(f"{source}\n{operate(names)}", names | {"TARGET": target}, kernels, "entry", "planaria_run").text()


def _text(target: Target, kind: str) -> str:
    """IR of a packed kind's kernels, or of everything else ("")."""
    if kind:
        from planaria.kernels.cpu.packed import kind_module

        return kind_module(target, KINDS[kind])
    from planaria.kernels.cpu.activations import activation_module
    from planaria.kernels.cpu.expert_kernels import expert_module
    from planaria.kernels.cpu.micro import DECLARATIONS
    from planaria.kernels.cpu.mla_values import mla_module
    from planaria.kernels.cpu.vector import vector_module

    matrix_module = (amx if target.tiled else micro).matrix_module
    modules = (matrix_module, vector_module, activation_module, expert_module, mla_module, _program)
    return "\n".join([DECLARATIONS, *(module(target) for module in modules)])


def compile_object(target: Target, kind: str = "") -> bytes:
    """Object code for one target: of everything but packed kinds, with the C symbol `planaria_run`, or of one kind."""
    machine = _machine(target)
    return machine.emit(machine.binding.parse_assembly(_text(target, kind)), as_written=True)


def ensure(target: Target, cache_dir: Path | None = None, kind: str = "") -> bytes:
    """The object code, from the cache or compiled and put there."""
    if kind and _beside:
        _beside.pop().wait()
    return objects.ensure(_file(target, cache_dir, kind), lambda: compile_object(target, kind))


def _file(target: Target, cache_dir: Path | None, kind: str) -> Path:
    sources = [Path(__file__).parent / f"{name}.py" for name in SOURCES]
    facts = (str(target), kind, *_machine(target).facts)
    return object_file(cache_dir or env.cache_dir() / "kernels", "kernels", sources, facts)


def compile_beside(target: Target, cache_dir: Path, kinds: Callable[[], Iterable[str]]) -> None:
    """Where nothing is compiled as yet, have a process of its own compile these packed kinds while this one compiles
    the rest: LLVM does one thing at a time in a process. `ensure` waits for it."""
    if _beside or not sys.executable or _file(target, cache_dir, "").exists():
        return
    wanted = [kind for kind in kinds() if not _file(target, cache_dir, kind).exists()]
    with contextlib.suppress(OSError):
        cache_dir.mkdir(parents=True, exist_ok=True)
        if wanted and os.access(cache_dir, os.W_OK):
            module = "planaria.kernels.cpu.build"
            command = [sys.executable, "-m", module, str(cache_dir), target.dtype, target.isa, *wanted]
            _beside.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL))


def load(target: Target, cache_dir: Path | None = None) -> EntryPoint:
    """The entry of the interpreter for a target, loaded into this process once."""
    return _once(target, cache_dir, "", lambda engine: _function(engine, "planaria_run", 2))


def packed_kernels(target: Target, cache_dir: Path | None, number: int) -> KindKernels:
    """Those of a packed kind, by its number, loaded into this process once."""
    from planaria.kernels.cpu.codes import PLACE_ARGS
    from planaria.kernels.cpu.packed import ENTRIES, few_rows
    from planaria.kernels.cpu.rounded import form_of

    def found(engine: Any) -> KindKernels:
        kind = KINDS[_of_number[number]]
        sizes = [form_of(target, kind).row_bytes, few_rows(target, kind)]
        table = np.array([engine.get_function_address(name) for name in ENTRIES] + sizes, np.int64)
        return KindKernels(table, _function(engine, "pl_place", len(PLACE_ARGS)))

    kernels: KindKernels = _once(target, cache_dir, _of_number[number], found)
    return kernels


def _once(target: Target, cache_dir: Path | None, kind: str, found: Callable[[Any], Any]) -> Any:
    with _lock:
        if (target, kind) not in _loaded:
            engine = _machine(target).load(ensure(target, cache_dir, kind), EXTERNAL)
            _loaded[target, kind] = found(engine), engine
        return _loaded[target, kind][0]


def _function(engine: Any, name: str, arguments: int) -> Any:
    """A C function of so many numbers that returns nothing."""
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * arguments)(engine.get_function_address(name))


def target_for(dtype: str, isa: str | None = None) -> Target:
    """The flavour for a dtype on this machine, or with an instruction level forced."""
    if isa is not None and isa not in ISAS:
        raise ValueError(f"isa {isa!r}: choose one of {', '.join(ISAS)}")
    return Target(dtype, isa or host_isa())


if __name__ == "__main__":
    folder, dtype, isa, *kinds = sys.argv[1:]
    for each in kinds:
        ensure(Target(dtype, isa), Path(folder), each)
