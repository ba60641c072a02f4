"""Drives the operations of vLLM's CPU build that one layer of Qwen3-MoE is made of, in its own python: the router's
product, the choice, and `cpu_fused_moe` on weights packed as its engine packs them. Around them its engine has Python
that is left out here, which is in its favour.

    {"do": "start", "folder": checkpoint, "dtype": name, "threads": n, "k": experts a token, "x": file} -> {"ok": about}
    {"do": "result", "tokens": n, "out": file}          the first rows' sums, in float32     -> {"ok": {}}
    {"do": "steps", "tokens": n, "seconds": s}          steps for so long, at least one      -> {"ok": {"ms": [...]}}
    {"do": "exit"}                                                                           -> {"ok": {}}
"""

from __future__ import annotations

import glob
import json
import os
import sys
import time
import traceback
from typing import Any

from peer_protocol import die_with_parent

PREFIX = "model.layers.0.mlp."


class Layer:
    def start(self, folder: str, dtype: str, threads: int, k: int, x: str) -> dict[str, Any]:
        import torch
        import vllm
        from safetensors.torch import load_file
        from vllm.platforms import current_platform

        current_platform.import_kernels()
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.experts import cpu_moe
        from vllm.model_executor.layers.fused_moe.router.cpu_router import select_experts

        torch.set_num_threads(threads)
        kernels = cpu_moe.CPUUnquantizedExperts
        if dtype == "bfloat16" and cpu_moe.X86CPUUnquantizedExperts._supports_current_device():
            kernels = cpu_moe.X86CPUUnquantizedExperts
        weights: dict[str, torch.Tensor] = {}
        for file in glob.glob(os.path.join(folder, "*.safetensors")):
            weights |= {name: w for name, w in load_file(file).items() if name.startswith(PREFIX)}
        self.router = weights[PREFIX + "gate.weight"]
        both, down = [], []
        for e in range(len(self.router)):
            one = f"{PREFIX}experts.{e}."
            both.append(torch.cat([weights[one + "gate_proj.weight"], weights[one + "up_proj.weight"]]))
            down.append(weights[one + "down_proj.weight"])
        self.gate_up = _custom_ops.cpu_prepack_moe_weight(torch.stack(both), kernels.isa)
        self.down = _custom_ops.cpu_prepack_moe_weight(torch.stack(down), kernels.isa)
        self.x = torch.load(x)
        self.k, self.isa = k, kernels.isa
        self.torch, self.product, self.choose = torch, _custom_ops.cpu_fused_moe, select_experts
        return {"version": vllm.__version__, "kernels": kernels.isa, "torch": torch.__version__}

    def step(self, tokens: int) -> Any:
        x = self.x[:tokens]
        logits = self.torch.nn.functional.linear(x, self.router)
        chosen, experts = self.choose(x, logits, self.k, use_grouped_topk=False, renormalize=True)
        out = self.torch.empty_like(x)
        self.product(out, x, self.gate_up, self.down, None, None, chosen, experts, "silu", self.isa, False)
        return out

    def result(self, tokens: int, out: str) -> dict[str, Any]:
        self.torch.save(self.step(tokens).float(), out)
        return {}

    def steps(self, tokens: int, seconds: float) -> dict[str, Any]:
        times: list[float] = []
        until = time.perf_counter() + seconds
        while not times or time.perf_counter() < until:
            since = time.perf_counter()
            self.step(tokens)
            times.append((time.perf_counter() - since) * 1e3)
        return {"ms": times}


def main() -> None:
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not break the protocol
    layer = Layer()
    for line in sys.stdin:
        message = json.loads(line)
        what = message.pop("do")
        try:
            do = {"start": layer.start, "result": layer.result, "steps": layer.steps, "exit": dict}[what]
            reply: dict[str, Any] = {"ok": do(**message)}
        except Exception as e:  # whatever it raises is this request's answer
            traceback.print_exc()
            reply = {"error": f"{type(e).__name__}: {e}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()
        if what == "exit":
            return


if __name__ == "__main__":
    main()
