"""What adapters cost: 32 rows over 8 of them, over none while they are loaded, and without `enable_lora`, in turn in
one run; how long loading takes. Adapters are random, of rank 16.

python -m benchmarks.lora --model smollm2 --tokens 48
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from planaria import LLM, LoRARequest, SamplingParams
from planaria.models.config import ModelConfig
from planaria.models.linears import linears

ROWS, ADAPTERS, RANK = 32, 8, 16


def write(folder: Path, model: ModelConfig, seed: int, modules: tuple[str, ...]) -> LoRARequest:
    folder.mkdir()
    chance, tensors = np.random.default_rng(seed), {}
    for name, (rows, columns) in linears(model).items():
        if not modules or name.endswith(modules):
            for part, shape in (("A", (RANK, columns)), ("B", (rows, RANK))):
                values = chance.standard_normal(shape, np.float32) * 0.01
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = values.astype(np.float16)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}))
    return LoRARequest(folder.name, seed, str(folder))


def steps(llm: LLM, adapters: list[LoRARequest | None], tokens: int) -> list[float]:
    """Seconds of each step in which all rows draw a token."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    seen: list[tuple[float, int]] = []
    llm.generate(
        [[100 + row, 7, 9, 11] for row in range(ROWS)], params, use_tqdm=False,
        lora_request=[adapters[row % len(adapters)] for row in range(ROWS)],
        on_tokens=lambda done, new: seen.append((time.perf_counter(), new)),
    )  # fmt: skip
    whole = [when for when, new in seen if new == ROWS]
    return [later - before for before, later in pairwise(whole)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    options: dict[str, Any] = {"max_num_seqs": ROWS, "max_model_len": 256, "skip_tokenizer_init": True}
    plain = LLM(given.model, **options)
    llm = LLM(given.model, enable_lora=True, max_loras=ADAPTERS, **options)
    with tempfile.TemporaryDirectory() as folder:
        kinds: dict[str, tuple[str, ...]] = {"q and v": ("q_proj", "v_proj"), "all matrices": ()}
        sets: dict[str, list[LoRARequest | None]] = {"no adapters": [None]}
        loads = []
        for number, (kind, modules) in enumerate(kinds.items()):
            sets[kind] = [write(Path(folder) / f"{number}-{i}", llm.config.model, i, modules) for i in range(ADAPTERS)]
            for one in sets[kind]:
                began = time.perf_counter()
                llm._adapter(one)
                loads.append(time.perf_counter() - began)
        found: dict[str, list[float]] = {}
        for _ in range(given.rounds):
            found.setdefault("base", []).extend(steps(plain, [None], given.tokens))
            for kind, adapters in sets.items():
                found.setdefault(kind, []).extend(steps(llm, adapters, given.tokens))
    print(f"{given.model}, {ROWS} rows; over {ADAPTERS} adapters of rank {RANK}; {given.rounds} rounds in turn")
    print(f"{'':14} median step, of base    best tenth, of base")
    for kind, seconds in found.items():
        median, base = statistics.median(seconds), statistics.median(found["base"])
        best, base_best = statistics.quantiles(seconds, n=10)[0], statistics.quantiles(found["base"], n=10)[0]
        print(f"{kind:14} {median * 1000:8.1f} ms {base / median:6.2f} {best * 1000:11.1f} ms {base_best / best:6.2f}")
    print(f"read and checked in {max(loads) * 1000:.0f} ms at most")


if __name__ == "__main__":
    main()
