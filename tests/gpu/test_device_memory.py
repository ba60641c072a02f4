"""A CUDA device's memory that outlives who computes in it: what a keeper has, this process and another map, and torch
computes with it."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest
import torch

from planaria.hosts.device_keeper import OwnedKeepers
from planaria.hosts.device_memory import Keepers
from planaria.kernels.torch_placed import seen

pytestmark = pytest.mark.gpu

SIZE = 64 << 20
CUDA = torch.device("cuda")

WRITES = """
import os, signal, sys, msgspec, torch
from planaria.hosts.device_memory import Keepers
from planaria.kernels.torch_placed import seen
torch.cuda.init()
keepers = Keepers(msgspec.json.decode(sys.argv[1], type=tuple[tuple[int, str], ...]), 0)
there = seen(keepers.take("kv/1/", int(sys.argv[2])), torch.device("cuda"))
assert not there.any()
there.view(torch.float32).copy_(torch.arange(len(there) // 4, device="cuda"))
torch.cuda.synchronize()
print("written", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def owned() -> Iterator[OwnedKeepers]:
    made = OwnedKeepers("cuda", [0])
    yield made
    made.close()


def test_what_a_killed_process_wrote_is_there(owned: OwnedKeepers) -> None:
    torch.cuda.init()
    told = msgspec.json.encode(owned.keeping).decode()
    done = subprocess.run([sys.executable, "-c", WRITES, told, str(SIZE)], capture_output=True, text=True, check=False)
    assert done.stdout == "written\n", done.stderr
    keepers = Keepers(owned.keeping, 0)
    for writable in (True, False):
        found = keepers.find("kv/1/", writable=writable)
        assert found is not None
        there = seen(found, CUDA).view(torch.float32)
        assert torch.equal(there[: SIZE // 4], torch.arange(SIZE // 4, device=CUDA, dtype=torch.float32))
        assert float((there[:1000] @ there[:1000]).item()) > 0


def test_memory_goes_when_it_is_dropped_and_nobody_has_it(owned: OwnedKeepers) -> None:
    torch.cuda.init()
    keepers = Keepers(owned.keeping, 0)
    keepers.take("first/", 2 << 20)  # a context, if the keeper needs one
    free, _ = torch.cuda.mem_get_info()
    there = seen(keepers.take("x/", SIZE), CUDA)
    assert free - torch.cuda.mem_get_info()[0] >= SIZE
    owned.close()
    assert not there.any()  # it is mapped
    del there
    gc.collect()
    assert torch.cuda.mem_get_info()[0] >= free
