"""OrderDone out in one of two networks: a pipeline over both, whose rank elsewhere is stopped, and whose other node is
then lost. Prints what came of it, as JSON."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import psutil

from planaria import LLM, SamplingParams
from tests.proc.servers import alive

PROMPTS = ["The capital of France is", "1 2 3 4 5 6"]


def raylet_at(address: str) -> int:
    """Pid of the raylet of the node with this address."""
    for process in psutil.process_iter(["name", "cmdline"]):
        if process.info["name"] == "raylet" and f"--node_ip_address={address}" in process.info["cmdline"]:
            return int(process.pid)
    raise LookupError(address)


def main() -> None:
    llm = LLM(
        "smollm2", dtype="float32", quantization="none", kv_cache_memory="64MiB", max_model_len=512,
        pipeline_parallel_size=2, distributed_executor_backend="ray", heartbeat_timeout=3.0,
    )  # fmt: skip
    gang = llm._loop.gang

    def run(harm: Callable[[], None] | None = None) -> list[list[int]]:
        came, left = 0, [harm] if harm is not None else []

        def count(done: int, tokens: int) -> None:
            nonlocal came
            came += tokens
            if came > 10 and left:
                left.pop()()

        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, on_tokens=count)]

    expected, before = run(), [member.pid for member in gang.members]
    found: dict[str, Any] = {"far": gang.places[1].address}
    found["stopped"] = run(lambda: os.kill(before[1], signal.SIGSTOP)) == expected
    after = [member.pid for member in gang.members]
    found["replaced"] = after[0] == before[0] and after[1] != before[1] and not alive(before[1])
    found["there"] = gang.places[1].address

    def lose_node() -> None:
        os.kill(raylet_at(gang.places[1].address), signal.SIGKILL)
        os.kill(after[1], signal.SIGKILL)

    found["node"] = run(lose_node) == expected
    found["layout"] = str(gang.layout)
    llm.close()
    found["left"] = [pid for pid in {*before, *after} if alive(pid)]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
