"""What a model answers with besides tokens: which hidden states become a vector, and what is made of that.

As vLLM decides it: `--runner`, `--convert` and `--pooler-config`, else what the folder says in sentence-transformers'
files, else what the architecture is. Pure, but for reading what was found in files before.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planaria.checkpoint.spec import Checkpoint
from planaria.config.json_option import json_option
from planaria.config.options import EngineOptions, PoolingConfig
from planaria.errors import ConfigError, ModelError
from planaria.models.config import ModelConfig
from planaria.types import POOLINGS

FLAG = "--pooler-config"
ACTIVATIONS = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": ""}  # of torch.nn


class PoolerWords(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's names. What isn't said is the model's own. activation: false: scores of labels are told as they are."""

    pooling_type: str | None = None
    seq_pooling_type: str | None = None  # its newer name
    normalize: bool | None = None
    dimensions: int | None = None  # of requests that say nothing
    activation: bool | None = None
    use_activation: bool | None = None
    softmax: bool | None = None


def resolve_pooling(
    options: EngineOptions, checkpoint: Checkpoint, model: ModelConfig, *, splits: bool
) -> tuple[ModelConfig, PoolingConfig]:  # fmt: skip
    """The model with the head that it is to have, and what it answers with. splits: steps are computed in parts, or
    together with other lanes, so they can't give logits and hidden states at once. Raises ConfigError, ModelError."""
    runner, convert, found = options.runner, options.convert, checkpoint.sentence
    words = json_option(FLAG, options.pooler_config or {}, PoolerWords)
    if runner == "auto":
        asked = convert in ("embed", "classify") or found or not model.has_logits
        runner = "pooling" if asked else "generate"
    if runner == "generate" and not model.has_logits:
        rule = f"{model.architecture} has nothing that draws tokens"
        raise ConfigError("--runner", "generate", rule, "use --runner pooling, or leave it out")
    if runner == "generate" and convert in ("embed", "classify"):
        raise ConfigError("--convert", convert, "is for --runner pooling", "leave one of them out")
    if runner == "pooling" and convert == "none" and model.has_logits:
        raise ConfigError("--convert", "none", f"{model.architecture} draws tokens", "use --convert embed")
    if convert == "classify" and model.head != "labels":
        rule = f"{model.architecture} has no scores of labels"
        raise ConfigError("--convert", "classify", rule, "give a ...ForSequenceClassification checkpoint")
    if runner == "pooling" and (model.has_logits or convert == "embed"):
        model = msgspec.structs.replace(model, head="", num_labels=0)
    kind = words.seq_pooling_type or words.pooling_type or found.get("pooling") or "last"
    if kind.lower() not in POOLINGS:
        names = ", ".join(name.upper() for name in POOLINGS)
        raise ConfigError(f"{FLAG} pooling_type", kind, "is not supported", f"use one of {names}")
    plain = PoolingConfig(kind=kind.lower(), width=model.hidden_size, tasks=("generate",))
    if model.head == "labels":
        return model, _labelled(plain, checkpoint.config, model, words)
    if model.has_logits and (options.runner == "generate" or splits):
        return model, plain
    normalize = words.normalize if words.normalize is not None else found.get("normalize", True)
    config = msgspec.structs.replace(
        plain, normalize=normalize, sizes=_sizes(checkpoint.config, model),
        tasks=("generate", "embed", "score") if model.has_logits else ("embed", "score"),
    )  # fmt: skip
    if words.dimensions is not None:
        if problem := config.dimensions_problem(words.dimensions):
            raise ConfigError(f"{FLAG} dimensions", words.dimensions, problem, "leave it out")
        config = msgspec.structs.replace(config, dimensions=words.dimensions)
    return model, config


def _sizes(hf: dict[str, Any], model: ModelConfig) -> tuple[int, ...] | None:
    """That a vector may be cut to, (): any; None: it may not be cut."""
    given = hf.get("matryoshka_dimensions")
    if given is None:
        return () if hf.get("is_matryoshka") is True else None
    if not isinstance(given, list) or not all(type(n) is int and 1 <= n <= model.hidden_size for n in given):
        raise ModelError(f"config.json: matryoshka_dimensions {given!r}: must be numbers from 1 to hidden_size")
    return tuple(given)


def _labelled(plain: PoolingConfig, hf: dict[str, Any], model: ModelConfig, words: PoolerWords) -> PoolingConfig:
    names = {str(number): str(name) for number, name in (hf.get("id2label") or {}).items()}
    labels = tuple(names.get(str(number), f"LABEL_{number}") for number in range(model.num_labels))
    says = [said for said in (words.activation, words.use_activation, words.softmax) if said is not None]
    return msgspec.structs.replace(
        plain, labels=labels, activation=_activation(hf, len(labels)) if all(says) else "",
        tasks=("classify", "score") if len(labels) == 1 else ("classify",),
    )  # fmt: skip


def _activation(hf: dict[str, Any], labels: int) -> str:
    """What makes probabilities of scores: by what it was trained for, what sentence-transformers says, else softmax, or
    sigmoid of a single one."""
    trained = {"regression": "", "single_label_classification": "", "multi_label_classification": "sigmoid"}
    usual = "sigmoid" if labels == 1 else "softmax"
    if (problem := hf.get("problem_type")) in trained:
        return usual if problem == "single_label_classification" else trained[problem]
    sentence = hf.get("sentence_transformers")
    named = sentence.get("activation_fn") if isinstance(sentence, dict) else None
    named = named or hf.get("sbert_ce_default_activation_function")
    if named is None:
        return usual
    name = str(named).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise ModelError(f"config.json: activation function {named!r} is not supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]
