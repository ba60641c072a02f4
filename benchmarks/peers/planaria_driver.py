"""Drives this engine, in process, through its public API."""

from __future__ import annotations

from typing import Any

from peer_protocol import Arrived, Parts, serve


class Planaria:
    def start(self, settings: dict[str, Any], parts: Parts) -> dict[str, Any]:
        with parts("import planaria"):
            from planaria import LLM, SamplingParams, __version__
        self.params = SamplingParams
        if settings.get("isa"):  # an instruction level below the machine's own
            from planaria.kernels.cpu import ops

            choose = ops.target_for
            ops.target_for = lambda dtype, isa: choose(dtype, settings["isa"])
        with parts("LLM(...)"):
            self.llm = LLM(
                settings["model"], dtype=settings.get("dtype", "bfloat16"), kernels=settings["kernels"],
                max_model_len=settings["max_model_len"], max_num_seqs=settings["max_num_seqs"],
                kv_cache_memory=settings["kv_bytes"], **{"threads": settings["threads"], **settings.get("options", {})},
            )  # fmt: skip
        facts = self.llm.facts
        parts.seconds |= {f"  {name}": seconds for name, seconds in facts.seconds.items()}
        return {
            "version": __version__, "dtype": facts.dtype, "weights": facts.quantization, "kernels": settings["kernels"],
            "weight_bytes": facts.weight_bytes, "kv_tokens": facts.num_blocks * facts.block_size,
        }  # fmt: skip

    def vocab_size(self) -> int:
        return self.llm.facts.vocab_size

    def run(self, prompts: list[list[int]], outputs: list[int], arrived: Arrived) -> str | None:
        params = [
            self.params(max_tokens=n, min_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False) for n in outputs
        ]
        self.llm.generate(prompts, params, on_tokens=lambda done, tokens: arrived(tokens))
        return None

    def close(self) -> None:
        self.llm.close()


if __name__ == "__main__":
    serve(Planaria())
