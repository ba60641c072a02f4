"""Which code runs a model: this package's, or Transformers' behind its attention interface (docs/adr/0054).

What Transformers makes of a config.json is found out by a program of its own (planaria.hf.look), so that nobody else
imports torch, and kept by content.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from planaria.cache import keep_file, kept_file
from planaria.checkpoint.spec import Checkpoint
from planaria.env import cache_dir
from planaria.errors import ModelError
from planaria.models import is_native, model_config
from planaria.models.common import DTYPES
from planaria.models.config import Foreign, ModelConfig, RopeConfig
from planaria.models.fields import refuse, size, token_ids

PROGRAM = "planaria.hf.look"
PATIENCE = 300.0  # seconds that it may take
OLDEST = 5  # version of Transformers
WITH_BOTH = 'pip install "planaria[torch,transformers]"'


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What planaria.hf.look says."""

    refused: str = ""
    num_heads: int = 0
    hidden_size: int = 0
    vocab_size: int = 0
    max_position: int | None = None
    foreign: Foreign | None = None


def model_of(checkpoint: Checkpoint, implementation: str = "auto") -> ModelConfig:
    """The model, run by this implementation; `auto`: by this package's code where that knows the family, else by
    Transformers'. Raises ModelError, one line."""
    hf, generation = checkpoint.config, checkpoint.generation_config
    if implementation == "planaria" or (implementation == "auto" and is_native(hf)):
        return model_config(hf, generation)
    try:
        return _foreign(checkpoint)
    except ModelError as e:
        if implementation == "transformers":
            raise ModelError(f"{named(hf)} can't be run by Transformers: {e}") from None
        try:
            return model_config(hf, generation)
        except ModelError as own:
            raise ModelError(f"{own}; nor can Transformers run it: {e}") from None


def named(hf: dict[str, Any]) -> str:
    """A model by its architecture, else its type."""
    names = hf.get("architectures")
    return ", ".join(map(str, names)) if isinstance(names, list) and names else str(hf.get("model_type"))


def _foreign(checkpoint: Checkpoint) -> ModelConfig:
    hf = checkpoint.config
    if checkpoint.format != "safetensors":
        raise ModelError(f"its weights are {checkpoint.format}, not safetensors")
    if hf.get("quantization_config"):
        raise ModelError("its weights are quantised, which that back end doesn't read")
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise ModelError(f"PyTorch and Transformers aren't both installed here: {WITH_BOTH}")
    from importlib.metadata import version

    release = version("transformers")
    if int(release.partition(".")[0]) < OLDEST:
        raise ModelError(f"Transformers {release} is too old, {OLDEST} is needed: {WITH_BOTH}")
    found = _look(hf, release)
    if found.refused or found.foreign is None:
        raise ModelError(found.refused)
    if found.max_position is None:
        raise ModelError("how long a text may be isn't said; --hf-overrides '{\"max_position_embeddings\": N}' says it")
    dtype = str(hf.get("dtype") or hf.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise refuse("dtype", dtype, f"is not supported; supported: {', '.join(DTYPES)}")
    layers, generation = found.foreign.layers, checkpoint.generation_config
    return ModelConfig(
        architecture=named(hf), hidden_size=found.hidden_size,
        intermediate_size=size(hf, "intermediate_size", 4 * found.hidden_size), num_layers=len(layers),
        num_heads=found.num_heads, num_kv_heads=max(layer.heads for layer in layers),
        head_dim=max(layer.width for layer in layers), vocab_size=found.vocab_size, max_position=found.max_position,
        norm_eps=1e-5, rope=RopeConfig(), dtype=dtype, foreign=found.foreign,
        eos_ids=token_ids(generation, "eos_token_id") or token_ids(hf, "eos_token_id"),
    )  # fmt: skip


def _look(hf: dict[str, Any], release: str) -> Found:
    """What Transformers of this release makes of a config.json. Raises ModelError."""
    from importlib.metadata import version

    asked = json.dumps(hf, sort_keys=True).encode()
    key = hashlib.sha256(f"{release} {version('torch')} ".encode() + asked)
    for source in sorted(Path(__file__).parents[1].glob("hf/*.py")):
        key.update(source.read_bytes())
    place = cache_dir() / "foreign" / key.hexdigest()
    if not (said := kept_file(place)):
        said = _run(asked)
        keep_file(place, said)
    try:
        return msgspec.json.decode(said, type=Found)
    except msgspec.MsgspecError as e:
        raise ModelError(f"{PROGRAM} says what can't be read: {e}") from None


def _run(asked: bytes) -> bytes:
    try:
        run = subprocess.run([sys.executable, "-m", PROGRAM], input=asked, capture_output=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        raise ModelError(f"Transformers has made nothing of its config.json in {PATIENCE:.0f} s") from None
    if run.returncode:
        lines = run.stderr.decode(errors="replace").strip().splitlines()
        raise ModelError(f"{PROGRAM} failed: {lines[-1] if lines else run.returncode}")
    return run.stdout.strip().splitlines()[-1]
