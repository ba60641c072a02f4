"""Drives vLLM's CPU build through `LLMEngine`, one step after the other.

`processes: 1` keeps its engine core in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), as ours is; 2 is its default.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

from peer_protocol import Arrived, Parts, serve


class VLLM:
    def start(self, settings: dict[str, Any], parts: Parts) -> dict[str, Any]:
        with parts("import vllm"):
            import vllm
            from vllm.sampling_params import RequestOutputKind
        self.params = lambda n: vllm.SamplingParams(
            max_tokens=n, min_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        with parts("engine"):
            llm = vllm.LLM(
                model=settings["model"], dtype="bfloat16", max_model_len=settings["max_model_len"],
                max_num_seqs=settings["max_num_seqs"], kv_cache_memory_bytes=settings["kv_bytes"],
                enable_prefix_caching=False, disable_log_stats=True, **settings.get("options", {}),
            )  # fmt: skip
        self.llm, self.engine = llm, llm.llm_engine
        self.numbers = itertools.count()
        cache = self.engine.vllm_config.cache_config
        return {
            "version": vllm.__version__, "dtype": "bfloat16",
            "engine in process": os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0",
            "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        }  # fmt: skip

    def vocab_size(self) -> int:
        return int(self.engine.model_config.get_vocab_size())

    def run(self, prompts: list[list[int]], outputs: list[int], arrived: Arrived) -> str | None:
        for prompt, n in zip(prompts, outputs, strict=True):
            self.engine.add_request(f"r{next(self.numbers)}", {"prompt_token_ids": prompt}, self.params(n))
        while self.engine.has_unfinished_requests():
            arrived(sum(len(part.token_ids) for output in self.engine.step() for part in output.outputs))
        return None

    def close(self) -> None:
        self.engine.engine_core.shutdown()


if __name__ == "__main__":
    serve(VLLM())
