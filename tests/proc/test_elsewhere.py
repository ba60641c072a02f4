"""On a system that isn't Linux, or on another processor, the plain kernels run a model in one process; what can't be
had is refused in one line. It is pretended: what such a system lacks is taken from Python before anything is imported.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from planaria import LLM, SamplingParams
from tests.proc.servers import TINY
from tests.tiers import representatives

# Torch looks at the system when it is imported, so it is there before.
PRETEND = """
import builtins, fcntl, importlib, mmap, os, platform, select, signal, socket, sys
import numpy, setproctitle, numba, zmq
system, machine, *words = sys.argv[1:]
if words[0] == "generate":
    import torch
sys.platform, platform.machine = system, lambda: machine
if system != "linux":
    absent = {
        os: ("memfd_create", "pidfd_open", "eventfd", "eventfd_read", "eventfd_write", "sched_getaffinity",
             "sched_setaffinity", "posix_fadvise", "posix_fallocate", "sendfile", "splice", "O_TMPFILE"),
        signal: ("pidfd_send_signal",), socket: ("SOCK_NONBLOCK", "SOCK_CLOEXEC", "SO_PEERCRED"), select: ("epoll",),
        fcntl: ("F_ADD_SEALS", "F_SEAL_SHRINK", "F_SETPIPE_SZ"),
        mmap: ("MADV_HUGEPAGE", "MADV_POPULATE_WRITE", "MAP_POPULATE"),
    }
    for module, names in absent.items():
        for name in names:
            module.__dict__.pop(name, None)
    def guarded(function):
        def call(path, *args, **more):
            if str(path).startswith(("/proc", "/sys", "/dev/shm")):
                raise FileNotFoundError(2, "there is no such thing on " + system, path)
            return function(path, *args, **more)
        return call
    for module, name in ((builtins, "open"), (os, "open"), (os, "listdir"), (os, "stat"), (os, "readlink")):
        setattr(module, name, guarded(getattr(module, name)))
from planaria.cli import main
sys.exit(main(words))
"""


def planaria_on(system: str, machine: str, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and error."""
    command = [sys.executable, "-c", PRETEND, system, machine, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout, done.stderr


DARWIN = ("darwin", "arm64")
ASK = ("--prompt-token-ids", "50,35,28,7", "--max-tokens", "6", "--temperature", "0", "--json")
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")


@needs_torch
@pytest.mark.parametrize(("system", "machine"), representatives([DARWIN, ("linux", "riscv64")], DARWIN))
def test_one_process_runs_by_the_plain_kernels(small: Path, system: str, machine: str) -> None:
    code, out, said = planaria_on(system, machine, "generate", str(small), *TINY, *ASK)
    assert code == 0, said
    options = {"kv_cache_memory": "8MiB", "max_model_len": 1024, "dtype": "float32", "skip_tokenizer_init": True}
    with LLM(str(small), kernels="torch", **options) as llm:
        (here,) = llm.generate([[50, 35, 28, 7]], SamplingParams(temperature=0, max_tokens=6))
    assert json.loads(out)["token_ids"] == list(here.outputs[0].token_ids)


REFUSED = [
    (("serve",), "processes are kept by Linux's pidfds and share its memory files, and this is darwin"),
    (("generate", *ASK, "-tp", "2"), "--distributed-executor-backend mp: processes are kept by Linux's"),
]


@pytest.mark.parametrize(("words", "says"), representatives(REFUSED, REFUSED[0]), ids=["serve", "generate"])
def test_processes_are_refused_in_a_line(small: Path, words: tuple[str, ...], says: str) -> None:
    code, _, said = planaria_on(*DARWIN, words[0], str(small), *TINY, *words[1:])
    (line,) = said.splitlines()
    assert code == 2 and line.startswith(f"planaria: {says}"), said
