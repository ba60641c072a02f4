"""Compiles the kernels with LLVM (llvmlite, which Numba brings), once, and keeps the object code.

The cache is one file per flavour, named by a hash of these sources, the compiler's versions and the CPU. It is
written beside and renamed, so a reader sees all of it or none. Where nothing can be written, nothing is kept.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
import threading
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import FunctionType
from typing import Any

from planaria.kernels.cpu.target import ISAS, Target

PROGRAM = ("collective", "threads", "products", "grouped", "mla", "program")  # the interpreter, in reading order
SOURCES = (
    *PROGRAM, "build", "compiler", "emit", "expert_kernels", "fields", "mla_values", "layout", "micro", "native",
    "target", "vector",
)  # fmt: skip
EXTERNAL = ("syscall", "memcpy", "memset", "memmove")  # all that object code calls outside itself
DIGEST = 32  # bytes of the checksum in front of a kept object
Entry = Any  # a C function (control block, thread) -> None, called without the interpreter lock

_lock = threading.Lock()
_loaded: dict[Target, tuple[Entry, Any]] = {}


def default_cache() -> Path:
    """Where kernels are kept unless told otherwise."""
    return Path(os.path.expanduser("~/.cache/planaria"))


def _initialise() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


def _c_function(name: str) -> int:
    """Address of a function of the C library."""
    return int(ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0)


def host_isa() -> str:
    """The highest of ISAS that this CPU and operating system offer."""
    has = _initialise().get_host_cpu_features()
    wide = all(has.get(name) for name in ("avx512f", "avx512bw", "avx512vl", "avx512dq"))
    if wide and has.get("avx512bf16"):
        return "avx512_bf16"
    return "avx512" if wide else "generic"


def _machine(target: Target) -> tuple[Any, str]:
    """An LLVM target machine, and what identifies it."""
    binding = _initialise()
    cpu, features = binding.get_host_cpu_name(), binding.get_host_cpu_features().flatten()
    if target.isa != host_isa() and cpu and "x86" in binding.get_process_triple():
        cpu, features = {"avx512": "x86-64-v4", "generic": "x86-64-v3"}[target.isa], ""
    machine = binding.Target.from_triple(binding.get_process_triple()).create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
    )
    return machine, f"{cpu} {features}"


def key(target: Target) -> str:
    """Hash of all that the object code depends on."""
    digest = hashlib.sha256()
    for name in SOURCES:
        digest.update((Path(__file__).parent / f"{name}.py").read_bytes())
    digest.update(version("llvmlite").encode())
    digest.update(f"{target} {_machine(target)[1]}".encode())
    return digest.hexdigest()[:24]


def cache_file(target: Target, folder: Path) -> Path:
    return folder / f"kernels-{key(target)}.o"


def _program() -> str:
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
    constants: dict[str, Any] = {}
    for name in PROGRAM:
        constants.update(vars(import_module(f"planaria.kernels.cpu.{name}")))
    return Module(source, constants, kernels, "entry", "planaria_run").text()


def compile_object(target: Target) -> bytes:
    """Object code of everything for one target, with the C symbol `planaria_run`."""
    from planaria.kernels.cpu.expert_kernels import expert_module
    from planaria.kernels.cpu.micro import DECLARATIONS, matrix_module
    from planaria.kernels.cpu.mla_values import mla_module
    from planaria.kernels.cpu.vector import vector_module

    binding = _initialise()
    machine, _ = _machine(target)
    parts = [matrix_module(target), vector_module(target), expert_module(target), mla_module(target), _program()]
    text = "\n".join([DECLARATIONS, *parts])
    module = binding.parse_assembly(text)
    module.triple, module.data_layout = binding.get_process_triple(), str(machine.target_data)
    module.verify()
    builder = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(module, builder)
    return bytes(machine.emit_object(module))


def _write(path: Path, data: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".kernels-")
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)


def ensure(target: Target, cache_dir: Path | None = None) -> bytes:
    """The object code, from the cache or compiled and put there."""
    path = cache_file(target, cache_dir or default_cache())
    try:
        kept = path.read_bytes()
    except OSError:
        kept = b""
    seal, data = kept[:DIGEST], kept[DIGEST:]
    if not data or hashlib.sha256(data).digest() != seal:  # none, or damaged: machine code is not run on trust
        data = compile_object(target)
        _write(path, hashlib.sha256(data).digest() + data)
    return data


def load(target: Target, cache_dir: Path | None = None) -> Entry:
    """The entry of the interpreter for a target, loaded into this process once."""
    with _lock:
        if target not in _loaded:
            binding = _initialise()
            data = ensure(target, cache_dir)
            for name in EXTERNAL:
                binding.add_symbol(name, _c_function(name))
            empty = binding.parse_assembly("")
            empty.triple = binding.get_process_triple()
            engine = binding.create_mcjit_compiler(empty, _machine(target)[0])
            engine.add_object_file(binding.ObjectFileRef.from_data(data))
            engine.finalize_object()
            address = engine.get_function_address("planaria_run")
            entry = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)(address)
            _loaded[target] = entry, engine
        return _loaded[target][0]


def target_for(dtype: str, isa: str | None = None) -> Target:
    """The flavour for a dtype on this machine, or with an instruction level forced."""
    if isa is not None and isa not in ISAS:
        raise ValueError(f"isa {isa!r}: choose one of {', '.join(ISAS)}")
    return Target(dtype, isa or host_isa())
