"""All-reduce between two processes of one node: shared memory beside gloo, microseconds per call.

`python benchmarks/mesh_reduce.py [--ranks 2] [--columns 576]`; medians of several rounds. "native" is the operation
as a recording runs it; "shared" as Python calls it; "gloo" is torch's own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import socket
import statistics
import time
from typing import Any

import numpy as np

ROWS = (1, 8, 32, 512)
ROUNDS = 7


def rank_main(rank: int, size: int, columns: int, fd: int, port: int, out: Any) -> None:
    import torch
    from torch._C._distributed_c10d import TCPStore

    from planaria.kernels.cpu import layout
    from planaria.kernels.cpu.build import load, target_for
    from planaria.kernels.cpu.fields import ROW_WORDS, ReduceOp
    from planaria.kernels.cpu.shared import SharedComm
    from planaria.mesh.gloo import GlooComm

    torch.set_num_threads(1)
    members = range(size)
    crowded = size > len(os.sched_getaffinity(0))
    shared = SharedComm(fd, rank, members, load(target_for("float32")), crowded=crowded)
    store = TCPStore("127.0.0.1", port, is_master=rank == 0)
    gloo = GlooComm(store, "bench", rank, members)
    found: dict[str, dict[int, float]] = {"native": {}, "shared": {}, "gloo": {}}

    def timed(name: str, rows: int, run: Any, calls: int, per_call: int = 1) -> None:
        times = []
        for _ in range(ROUNDS):
            shared.meet()
            since = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - since) / calls / per_call * 1e6)
        found[name][rows] = statistics.median(times)

    for rows in ROWS:
        x = np.zeros((rows, columns), np.float32)
        calls = 300 if rows <= 32 else 40
        for name, comm in (("shared", shared), ("gloo", gloo)):
            comm.all_reduce(x)
            timed(name, rows, lambda comm=comm, x=x: comm.all_reduce(x), calls)
        # a tape of many reductions: what one costs inside a step
        repeat = 64
        tape = np.zeros((repeat, ROW_WORDS), np.int64)
        tape[:, :7] = ReduceOp.code, shared.port, x.ctypes.data, x.ctypes.data, x.nbytes, 0, 0
        tickets = np.zeros(repeat * layout.TICKET_BYTES, np.uint8)
        place = {layout.TAPE: tape.ctypes.data, layout.OPS: repeat, layout.TICKETS: tickets.ctypes.data}
        words = {**shared._control, **place}
        timed("native", rows, lambda words=words: shared._team.run(words, None), max(1, calls // 16), repeat)
        shared.check()
    if rank == 0:
        out.put(found)
    shared.meet()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--columns", type=int, default=576)
    parser.add_argument("--json")
    args = parser.parse_args()
    from planaria.mesh.segment import create_segment

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = mp.get_context("fork")  # before anything is imported that has threads; keeps the descriptor
    fd, out = create_segment(), context.Queue()
    ranks = [
        context.Process(target=rank_main, args=(rank, args.ranks, args.columns, fd, port, out))
        for rank in range(args.ranks)
    ]
    for rank in ranks:
        rank.start()
    found = out.get(timeout=120)
    for rank in ranks:
        rank.join()
    print(f"all-reduce of [rows, {args.columns}] float32 over {args.ranks} ranks, us")
    print(f"{'rows':>6} {'native':>9} {'shared':>9} {'gloo':>9} {'gloo/native':>12}")
    for rows in ROWS:
        native, shared, gloo = (found[name][rows] for name in ("native", "shared", "gloo"))
        print(f"{rows:>6} {native:>9.1f} {shared:>9.1f} {gloo:>9.1f} {gloo / native:>12.1f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(found, f)


if __name__ == "__main__":
    main()
