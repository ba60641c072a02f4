"""generation_config.json: how a model's makers would have its tokens chosen, where a request doesn't say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from planaria.checkpoint.folder import read_json
from planaria.env import path_of
from planaria.errors import ModelError, RequestError
from planaria.types import SamplingParams

FILE = "generation_config.json"
FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def generation_config(option: str, own: dict[str, Any]) -> dict[str, Any]:
    """option: "auto" is the model's `own`; "vllm" is that without anything about sampling (its end tokens stay); else
    a folder that has another. Raises ModelError."""
    if option == "auto":
        return own
    if option == "vllm":
        return {name: value for name, value in own.items() if name not in FIELDS}
    return read_json(path_of(option) / FILE, missing="--generation-config takes auto, vllm or its folder")


def sampling_defaults(generation: Mapping[str, Any]) -> SamplingParams:
    """SamplingParams of a request that says nothing. Raises ModelError for a value that can't be one."""
    try:
        params = msgspec.convert(_given(generation), SamplingParams)
        params.verify()
    except (msgspec.ValidationError, RequestError) as e:
        raise ModelError(f"{FILE}: {e}; use --generation-config vllm, which takes nothing from it") from None
    return params


def said(generation: Mapping[str, Any]) -> str:
    """What of it a request gets by default, for people; "" for nothing."""
    return ", ".join(f"{name} {value}" for name, value in _given(generation).items())


def _given(generation: Mapping[str, Any]) -> dict[str, Any]:
    return {name: generation[name] for name in FIELDS if generation.get(name) is not None}
