"""llama.cpp's quantiser, and its logits of a text. Run by its environment's python.

llama_cpp_packed.py quantise SOURCE TARGET KIND     KIND: Q4_K_M, ... (what `llama-quantize` calls it)
llama_cpp_packed.py logits MODEL TOKENS.npy OUT.npy [f32]     f32: a KV cache of that, not of float16
llama_cpp_packed.py tokens MODEL TEXTS.json     prints their ids
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable

import llama_cpp as lib  # type: ignore[import-not-found]  # of the peer's environment
import numpy


def quantise(source: str, target: str, kind: str) -> None:
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}"), True
    if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp can't make {kind} of {source}")


def logits(path: str, tokens: str, out: str, cache: str = "") -> None:
    """Of each token of a text, in passes of 256."""
    ids = numpy.load(tokens)
    model = lib.llama_model_load_from_file(path.encode(), lib.llama_model_default_params())
    wanted = lib.llama_context_default_params()
    wanted.n_ctx, wanted.n_threads, wanted.n_threads_batch = len(ids) + 256, 2, 2
    if cache:
        wanted.type_k = wanted.type_v = lib.GGML_TYPE_F32
        wanted.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context = lib.llama_init_from_model(model, wanted)
    size = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch, found = lib.llama_batch_init(256, 0, 1), numpy.empty((len(ids), size), numpy.float32)
    for first in range(0, len(ids), 256):
        part = ids[first : first + 256]
        for i, token in enumerate(part):
            batch.token[i], batch.pos[i], batch.logits[i] = int(token), first + i, True
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
        batch.n_tokens = len(part)
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        for i in range(len(part)):
            found[first + i] = numpy.ctypeslib.as_array(lib.llama_get_logits_ith(context, i), shape=(size,))
    numpy.save(out, found)


def tokens(path: str, texts: str) -> None:
    params = lib.llama_model_default_params()
    params.vocab_only = True
    model = lib.llama_model_load_from_file(path.encode(), params)
    if not model:
        sys.exit(f"llama.cpp can't read {path}")
    vocab, room, found = lib.llama_model_get_vocab(model), (lib.llama_token * 4096)(), []
    with open(texts, encoding="utf-8") as f:
        for text in (text.encode() for text in json.load(f)):
            found.append(room[: lib.llama_tokenize(vocab, text, len(text), room, len(room), True, True)])
    print(json.dumps(found))


if __name__ == "__main__":
    quiet = lib.llama_log_callback(lambda level, text, data: None)
    lib.llama_log_set(quiet, None)
    lib.llama_backend_init()
    commands: dict[str, Callable[..., None]] = {"quantise": quantise, "logits": logits, "tokens": tokens}
    commands[sys.argv[1]](*sys.argv[2:])
