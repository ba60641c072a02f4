"""Groups over NCCL, with a process and a device for each rank: the operations, and the end of waits. And ranks that
share one device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planaria.mesh.gloo import open_store
from tests.model.checkpoints import write_checkpoint
from tests.model.engines import Engine, texts

pytestmark = pytest.mark.gpu

RANK = """
import os, signal, sys, threading
import torch
from planaria.mesh.comm import CollectiveAborted
from planaria.mesh.gloo import join_store
from planaria.mesh.nccl import NcclComm
rank, port, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
torch.cuda.set_device(rank)
comm = NcclComm(join_store("127.0.0.1", port), "group", rank, (10, 11), custom=what != "go on by NCCL")
print("sums" if comm.sums is not None else "no sums", file=sys.stderr)  # the log says why not
for where in ("cuda", "cpu"):
    x = torch.full((100,), float(rank + 1), device=where)
    comm.all_reduce(x)
    assert x.tolist() == [3.0] * 100
    x = torch.full((7,), float(rank), device=where)
    comm.broadcast(x, 1)
    assert x.tolist() == [1.0] * 7
    columns = [range(3), range(3, 8)][rank]
    for rows in (2, 5):
        whole = torch.arange(rows * 8.0, device=where).view(rows, 8)
        out = comm.gather_columns(whole[:, columns.start : columns.stop].contiguous(), columns, 8)
        assert rank or torch.equal(out, whole)
    for i in range(100):  # senders run ahead
        if rank == 0:
            comm.send(torch.full((i + 1,), float(i), device=where), 1)
        else:
            x = torch.zeros(i + 1, device=where)
            comm.receive(x, 0)
            assert bool((x == i).all())
print("ready", flush=True)
if what == "stop":
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    sys.stdin.readline()
    x = torch.zeros(8, device="cuda")
    threading.Timer(0.5, comm.abort, ["rank 11 is stopped"]).start()
    try:
        comm.all_reduce(x)
        torch.cuda.synchronize()
        comm.all_reduce(x)
    except CollectiveAborted as e:
        assert "rank 11 is stopped" in str(e)
        print("ended", flush=True)
comm.close()
"""


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL wants two CUDA devices for two ranks")
@pytest.mark.parametrize("what", ["go on", "go on by NCCL", "stop"])
def test_two_devices(what: str) -> None:
    _store, port = open_store("127.0.0.1")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(port), what],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for rank in ranks:
            assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
        if what == "stop":
            os.waitid(os.P_PID, ranks[1].pid, os.WSTOPPED | os.WNOWAIT)
            assert ranks[0].stdin is not None and ranks[0].stdout is not None
            ranks[0].stdin.write("\n")
            ranks[0].stdin.flush()
            assert ranks[0].stdout.readline() == "ended\n"
        else:
            assert [rank.wait(60) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGCONT)
            rank.kill()
            rank.wait(60)


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64}


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_two_ranks_on_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, experts: bool) -> None:
    """An engine of two tensor ranks gives the tokens of one rank, also after one is killed."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    family, more = ("qwen2_moe", {"shared_expert_intermediate_size": 64, **EXPERTS}) if experts else ("llama", {})
    model = str(write_checkpoint(tmp_path, family, num_hidden_layers=4, **more))
    asked, options = texts(100, [(70, 20), (40, 20)]), {"device": "cuda", "kernels": "torch"}
    with Engine(model, **options) as engine:
        expected = engine.run(asked)
    with Engine(model, tensor_parallel_size=2, enable_expert_parallel=experts, **options) as engine:
        assert engine.run(asked) == expected
        assert engine.run(asked, 4, lambda: engine.kill(1, signal.SIGKILL)) == expected
        assert engine.loop.core is not None and engine.loop.core.replayed_tokens == 0
