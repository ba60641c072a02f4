"""Drives llama.cpp through its own batch interface: prompts together, then one decode a step for all sequences.

Greedy is an argmax over its logits in numpy, which costs less than its Python wrapper's sampler.
"""

from __future__ import annotations

import os
from typing import Any

from peer_protocol import Arrived, Parts, serve

MICRO_BATCH = 512  # its default, tokens of one pass
BATCH = 2048


class LlamaCpp:
    def start(self, settings: dict[str, Any], parts: Parts) -> dict[str, Any]:
        with parts("import llama_cpp"):
            import llama_cpp
            import numpy
        self.lib, self.numpy = llama_cpp, numpy
        lib = llama_cpp
        self.quiet = lib.llama_log_callback(lambda level, text, data: None)  # kept: the library holds the pointer
        lib.llama_log_set(self.quiet, None)
        lib.llama_backend_init()
        with parts("weights"):
            self.model = lib.llama_model_load_from_file(settings["model"].encode(), lib.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"{settings['model']}: llama.cpp can't load it")
        with parts("context"):
            wanted = lib.llama_context_default_params()
            per_token = 2 * 2 * lib.llama_model_n_layer(self.model) * self._kv_width()
            wanted.n_ctx = settings["kv_bytes"] // per_token // 256 * 256
            wanted.n_batch, wanted.n_ubatch = BATCH, MICRO_BATCH
            wanted.n_seq_max = settings["max_num_seqs"]
            wanted.n_threads = wanted.n_threads_batch = settings["threads"]
            wanted.kv_unified = True  # sequences share one pool, so each may be as long as it likes
            self.context = lib.llama_init_from_model(self.model, wanted)
        if not self.context:
            raise RuntimeError("llama.cpp can't make a context")
        self.vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model))
        self.batch = lib.llama_batch_init(BATCH, 0, 1)
        return {
            "version": llama_cpp.__version__, "dtype": os.path.basename(settings["model"]),
            "kv_tokens": int(lib.llama_n_ctx(self.context)), "kv_touched": True,  # it is zeroed at the start
        }  # fmt: skip

    def _kv_width(self) -> int:
        lib, model = self.lib, self.model
        return lib.llama_model_n_embd(model) // lib.llama_model_n_head(model) * lib.llama_model_n_head_kv(model)

    def vocab_size(self) -> int:
        return int(self.vocab)

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """One pass over (token, position, sequence, wanted); the likeliest next token of each wanted one."""
        batch, lib = self.batch, self.lib
        for i, (token, position, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            batch.logits[i] = wanted
        batch.n_tokens = len(entries)
        code = lib.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        return [
            int(self.numpy.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, i), shape=(self.vocab,)).argmax())
            for i, entry in enumerate(entries)
            if entry[3]
        ]

    def run(self, prompts: list[list[int]], outputs: list[int], arrived: Arrived) -> str | None:
        self.lib.llama_memory_clear(self.lib.llama_get_memory(self.context), True)
        last: dict[int, int] = {}
        made = [0] * len(prompts)

        def took(sequences: list[int], tokens: list[int]) -> None:
            arrived(len(tokens))
            for sequence, token in zip(sequences, tokens, strict=True):
                made[sequence] += 1
                last[sequence] = token
                if made[sequence] == outputs[sequence]:
                    del last[sequence]

        pending: list[tuple[int, int, int, bool]] = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for first in range(0, len(pending), BATCH):
            part = pending[first : first + BATCH]
            took([entry[2] for entry in part if entry[3]], self._decode(part))
        while last:
            going = sorted(last)
            entries = [(last[s], len(prompts[s]) + made[s] - 1, s, True) for s in going]
            took(going, self._decode(entries))
        return None

    def close(self) -> None:
        self.lib.llama_batch_free(self.batch)
        self.lib.llama_free(self.context)
        self.lib.llama_model_free(self.model)


if __name__ == "__main__":
    serve(LlamaCpp())
