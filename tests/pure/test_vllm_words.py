"""What is called otherwise in vLLM, and what a model's makers advise (generation_config.json)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planaria.checkpoint.generation import generation_config, said, sampling_defaults
from planaria.config.options import EngineOptions
from planaria.config.vllm_words import NEUTRAL, RENAMED, VARIABLES, WITHOUT_EFFECT, ours, variables
from planaria.errors import ConfigError, ModelError
from planaria.types import SamplingParams

OWN = {"eos_token_id": [2], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}


def test_arguments_without_effect_are_named_in_one_line() -> None:
    given = {"trust_remote_code": True, "gpu_memory_utilization": 0.9, "seed": 0, "quantization": None, "dtype": "half"}
    options, line = ours("m", given)
    assert options == {"seed": 0, "dtype": "bfloat16"}
    assert line == (
        "arguments without effect here: trust_remote_code, gpu_memory_utilization (use kv_cache_memory); "
        "dtype half is bfloat16 here"
    )
    assert ours("m", {"scheduling_policy": "priority", "tokenizer": "m"}) == ({"policy": "priority"}, "")


@pytest.mark.parametrize(
    ("name", "value"), [("tokenizer", "other"), ("revision", "v2"), ("enable_lora", True), ("kv_cache_dtype", "fp8")]
)
def test_what_would_change_answers_is_refused(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name} .*is not supported"):
        ours("m", {name: value})


def test_no_word_has_two_meanings() -> None:
    own = set(EngineOptions.__struct_fields__)
    assert not own & {*WITHOUT_EFFECT, *NEUTRAL, *RENAMED} and set(RENAMED.values()) <= own


def test_variables() -> None:
    found = variables({"VLLM_API_KEY": "secret", "VLLM_DP_SIZE": "2", "VLLM_USE_V1": "1", "HOME": "/"})
    assert found == (
        "variables of vLLM are not read: VLLM_API_KEY (here: PLANARIA_API_KEY), VLLM_DP_SIZE (here: PLANARIA_DP_SIZE)"
    )
    assert variables({"PLANARIA_API_KEY": "x"}) == ""
    flags = {option.split()[0] for option in VARIABLES.values() if option.startswith("--")}
    assert {flag.removeprefix("--").replace("-", "_") for flag in flags} <= set(EngineOptions.__struct_fields__)


def test_defaults_come_from_the_model_or_a_folder_or_nowhere(tmp_path: Path) -> None:
    assert sampling_defaults(generation_config("auto", OWN)) == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    assert generation_config("vllm", OWN) == {"eos_token_id": [2], "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7, "min_p": 0.1, "top_p": None}))
    other = generation_config(str(tmp_path), OWN)
    assert other["eos_token_id"] == 7 and sampling_defaults(other) == SamplingParams(min_p=0.1)
    assert said(other) == "min_p 0.1" and said({}) == ""
    with pytest.raises(ModelError, match=r"generation_config\.json.*--generation-config takes auto, vllm"):
        generation_config(str(tmp_path / "none"), OWN)


@pytest.mark.parametrize("value", [{"temperature": -1}, {"top_p": 0}, {"top_k": "many"}, {"temperature": float("nan")}])
def test_values_that_cant_be(value: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: .*--generation-config vllm"):
        sampling_defaults(value)


def test_parameters_that_are_none_or_lists_as_vllm_takes_them() -> None:
    params = SamplingParams(stop=None, stop_token_ids=[3], bad_words=["a", "b"], seed=None)  # type: ignore[arg-type]
    assert params == SamplingParams(stop_token_ids=(3,), bad_words=("a", "b"))
    params.max_tokens = 5
    assert params.max_tokens == 5
