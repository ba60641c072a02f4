"""Object code by LLVM (llvmlite, which Numba brings): compiled once, kept in the cache by its content, loaded.

A file's name has a hash of all that the code depends on, and what is read back is checked: machine code is not run on
trust. Its time of change is that of its last use: what no version used for long goes when another is made.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import time
from collections.abc import Callable, Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from planaria import cache

# On most of Intel's CPUs LLVM would make two instructions of vpdpwssd, which is shorter where each waits for the last;
# here many sums are added up beside each other, and what counts is how many instructions there are
ONE_INSTRUCTION = "+fast-dpwssd"
UNUSED = 30 * 86400.0  # seconds without a use after which an object may go


def initialise() -> Any:
    """llvmlite's binding, ready for this machine."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


class CodeMachine:
    """What code is made for: this host's CPU, or another by LLVM's name. `facts`: what tells it from others."""

    def __init__(self, cpu: str = "", features: str = "") -> None:
        self.binding = initialise()
        if not cpu:
            cpu, features = self.binding.get_host_cpu_name(), self.binding.get_host_cpu_features().flatten()
        self.triple = self.binding.get_process_triple()
        if "x86" in self.triple:
            features = f"{features},{ONE_INSTRUCTION}".strip(",")
        self._machine = self.binding.Target.from_triple(self.triple).create_target_machine(
            cpu=cpu, features=features, opt=3, reloc="default", codemodel="jitdefault", jit=True
        )
        self.facts = (version("llvmlite"), self.triple, cpu, features)

    def emit(self, module: Any, *, as_written: bool = False) -> bytes:
        """Object code of a parsed module. as_written: functions are neither inlined nor their loops changed, which in
        code that was written with its registers and loops in mind takes more than half of the time, for nothing."""
        module.triple, module.data_layout = self.triple, str(self._machine.target_data)
        module.verify()
        builder = self.binding.create_pass_builder(
            self._machine, self.binding.create_pipeline_tuning_options(speed_level=2)
        )
        if as_written:
            passes = self.binding.create_new_function_pass_manager()
            passes.add_sroa_pass()  # variables are in registers
            passes.add_instruction_combine_pass()
            passes.add_simplify_cfg_pass()
            for function in module.functions:
                if not function.is_declaration:
                    passes.run(function, builder)
        else:
            builder.getModulePassManager().run(module, builder)
        return bytes(self._machine.emit_object(module))

    def load(self, code: bytes, external: Iterable[str] = ()) -> Any:
        """An engine with the code in this process, to be asked for addresses and held as long as they are used.
        external: functions of the C library that it calls."""
        for name in external:
            address = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value
            self.binding.add_symbol(name, address or 0)
        empty = self.binding.parse_assembly("")
        empty.triple = self.triple
        engine = self.binding.create_mcjit_compiler(empty, self._machine)
        engine.add_object_file(self.binding.ObjectFileRef.from_data(code))
        engine.finalize_object()
        return engine


def object_file(folder: Path, kind: str, sources: Iterable[Path], facts: Iterable[str]) -> Path:
    """Where the object code of these sources is or would be."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    for fact in facts:
        digest.update(fact.encode() + b"\0")
    return folder / f"{kind}-{digest.hexdigest()[:24]}.o"


def ensure(path: Path, compile: Callable[[], bytes]) -> bytes:
    """The object code, from the cache or compiled and put there; then those of its kind that were long unused go."""
    code = cache.kept_file(path)
    if code:
        with contextlib.suppress(OSError):  # somebody else's cache
            os.utime(path)
        return code
    code = compile()
    cache.keep_file(path, code)
    for other in path.parent.glob(f"{path.name.partition('-')[0]}-{'?' * 24}.o"):
        with contextlib.suppress(OSError):
            if other.stat().st_mtime < time.time() - UNUSED:
                other.unlink()
    return code
