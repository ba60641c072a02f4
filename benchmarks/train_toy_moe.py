"""Trains a toy with experts, so that their load is skewed as in trained models: none is to be had from the registries.

    python -m benchmarks.train_toy_moe FOLDER [--steps 600] [--minutes 20]

The layout of Mixtral, 27 million parameters, 16 experts in each of 4 layers, 2 for a token; the text is the source of
Python's standard library, in pieces of its own. The seed is fixed, so equal steps on equal versions give the same
weights; `--minutes` ends it earlier, and the last lines say after how many. FOLDER gets the checkpoint with its
tokenizer, and `load.json`: the loss, and tokens of each layer's experts on two windows of text that was held out.
Nothing in the loss asks for even load. It is a toy: it imitates the look of Python.
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

from benchmarks.experts_toy import skews

SEED = 1
END = "<|end|>"  # of a file
VOCAB, CONTEXT, BATCH, HELD_OUT = 4096, 256, 8, 64  # tokens, of a sequence; sequences in a step and held out
RATE, WARM_UP = 1e-3, 20  # steps
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "num_local_experts": 16, "num_experts_per_tok": 2, "max_position_embeddings": 1024,
    "sliding_window": None, "tie_word_embeddings": True, "router_aux_loss_coef": 0.0,
}  # fmt: skip
PROMPT = "def "

Load = list[list[int]]  # tokens of each layer's experts


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def texts() -> list[str]:
    """The modules of the standard library, in order of their names."""
    root = Path(sysconfig.get_path("stdlib"))
    found = sorted(path for pattern in ("*.py", "[a-z]*/*.py") for path in root.glob(pattern))
    return [
        path.read_text(encoding="utf-8", errors="replace")
        for path in found if not {"site-packages", "test", "idlelib"} & set(path.relative_to(root).parts)
    ]  # fmt: skip


def tokenizer_of(corpus: list[str]) -> Any:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, bos_token=END)


def sequences(corpus: list[str], tokenizer: Any) -> torch.Tensor:
    """[N, CONTEXT], in an order drawn by the seed."""
    ids: list[int] = []
    for text in corpus:
        ids += [tokenizer.eos_token_id, *tokenizer.encode(text, add_special_tokens=False)]
    rows = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]


@torch.no_grad()
def measured(model: Any, rows: torch.Tensor) -> tuple[float, list[Load]]:
    """The loss on rows, and the load of their first and their second half."""
    model.eval()
    load = torch.zeros(2, SHAPE["num_hidden_layers"], SHAPE["num_local_experts"], dtype=torch.int64)
    losses = []
    for index, part in enumerate(rows.split(BATCH)):
        out = model(input_ids=part, labels=part, output_router_logits=True)
        losses.append(out.loss.item() * len(part))
        for layer, logits in enumerate(out.router_logits):
            chosen = logits.view(-1, logits.shape[-1]).topk(SHAPE["num_experts_per_tok"]).indices
            counts = chosen.flatten().bincount(minlength=SHAPE["num_local_experts"])
            load[2 * index * BATCH // len(rows), layer] += counts
    return sum(losses) / len(rows), load.tolist()


def train(model: Any, rows: torch.Tensor, steps: int, until: float) -> int:
    """Returns how many steps were done."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for step in range(steps):
        if time.monotonic() > until:
            return step
        left = 1 - step / steps
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / WARM_UP, left)
        part = rows[[(step * BATCH + i) % len(rows) for i in range(BATCH)]]
        loss = model(input_ids=part, labels=part).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            say(f"step {step}: loss {loss.item():.3f}, {time.process_time():.0f} s of CPU")
    return steps


@torch.no_grad()
def sample(model: Any, tokenizer: Any) -> str:
    model.eval()
    torch.manual_seed(SEED)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    out = model.generate(ids, max_new_tokens=60, do_sample=True, temperature=0.6, top_k=40)
    return str(tokenizer.decode(out[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="outside of the repository")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    until = time.monotonic() + 60 * options.minutes
    corpus = texts()
    tokenizer = tokenizer_of(corpus)
    rows = sequences(corpus, tokenizer)
    end = tokenizer.eos_token_id
    model: Any = MixtralForCausalLM(MixtralConfig(vocab_size=VOCAB, bos_token_id=end, eos_token_id=end, **SHAPE))
    count = sum(p.numel() for p in model.parameters())
    say(f"{count / 1e6:.1f} million parameters, {rows.numel() / 1e6:.1f} million tokens")
    held, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    before, first = measured(model, held)
    done = train(model, rows, options.steps, until)
    after, load = measured(model, held)
    model.save_pretrained(options.folder)
    tokenizer.save_pretrained(options.folder)
    record = {
        "steps": done, "loss": [before, after], "cpu_seconds": time.process_time(), "untrained": first, "load": load,
    }  # fmt: skip
    (options.folder / "load.json").write_text(json.dumps(record))
    for name, loss, windows in (("untrained", before, first), ("trained", after, load)):
        shown = ", ".join(f"{skew:.2f}" for skew in skews(windows[1]))
        print(f"{name}: loss {loss:.3f} held out; busiest expert of each layer over the mean: {shown}")
    print(f"a sample: {sample(model, tokenizer)!r}")
    print(f"{options.folder}: {done} of {options.steps} steps, {record['cpu_seconds']:.0f} s of CPU; a toy")


if __name__ == "__main__":
    main()
