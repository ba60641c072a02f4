"""Drives Hugging Face Transformers' `generate`, which takes a batch of prompts of one length."""

from __future__ import annotations

from typing import Any

from peer_protocol import Arrived, Parts, serve


class Transformers:
    def start(self, settings: dict[str, Any], parts: Parts) -> dict[str, Any]:
        with parts("import torch, transformers"):
            import torch
            import transformers
            from transformers import AutoModelForCausalLM
        self.torch = torch
        torch.set_num_threads(settings["threads"])
        with parts("weights"):
            self.model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.bfloat16).eval()
        return {
            "version": transformers.__version__, "dtype": "bfloat16", "torch": torch.__version__,
            "kv_tokens": 0,  # its cache lives as long as a call of generate
        }  # fmt: skip

    def vocab_size(self) -> int:
        return int(self.model.config.vocab_size)

    def run(self, prompts: list[list[int]], outputs: list[int], arrived: Arrived) -> str | None:
        if len({len(p) for p in prompts}) > 1 or len(set(outputs)) > 1:
            return "a batch has one length"

        class Streamer:
            """Is given the prompt first, then each step's tokens."""

            seen_prompt = False

            def put(self, tokens: Any) -> None:
                if self.seen_prompt:
                    arrived(len(prompts))
                self.seen_prompt = True

            def end(self) -> None:
                pass

        ids = self.torch.tensor(prompts)
        with self.torch.inference_mode():
            self.model.generate(
                ids, attention_mask=self.torch.ones_like(ids), max_new_tokens=outputs[0], min_new_tokens=outputs[0],
                do_sample=False, pad_token_id=0, streamer=Streamer(),
            )  # fmt: skip
        return None

    def close(self) -> None:
        pass


if __name__ == "__main__":
    serve(Transformers())
