"""What is called otherwise in vLLM (and the page that says so), and what a model's makers advise."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import typer

from planaria.checkpoint.generation import generation_config, said, sampling_defaults
from planaria.cli.app import app
from planaria.cli.words import Translation
from planaria.config.declared import options_of
from planaria.config.options import EngineOptions
from planaria.config.vllm_words import (
    ABSENT,
    INSTEAD,
    NEUTRAL,
    RENAMED,
    VALUES,
    VARIABLES,
    WITHOUT_EFFECT,
    WORDS,
    ours,
    variables,
)
from planaria.errors import ConfigError, ModelError, RequestError, UserError
from planaria.server.config import ServerConfig
from planaria.types import SamplingParams, StructuredOutputsParams
from tests.model.vllm_words import LINES

PAGE = Path(__file__).parents[2] / "docs" / "coming-from-vllm.md"
WRITE = "write it with `python -m tests.pure.test_vllm_words`"
OWN = {"eos_token_id": [2], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": True}

# Of a command line: what is typed, and what that is here.
TYPED = (
    ("--model M", "M", "MODEL; also by its place, as `vllm serve M`."),
    ("--config FILE", "", "A file of YAML, `name: value`; the command line counts."),
    ("--dtype half", "--dtype bfloat16", "So is float16; `float` is float32. A line says so."),
    ("--max-model-len 4k", "--max-model-len 4k", "4K is 4,096; `auto` (or -1): as long as KV memory allows."),
    ("--max_num_seqs=8", "--max-num-seqs 8", "Underscores and `=` are as good."),
    ("--gpu-memory-utilization 0.8", "--gpu-memory-utilization 0.8", "Of a GPU. On a CPU: `--kv-cache-memory`."),
    ("--kv-cache-memory-bytes 4G", "--kv-cache-memory 4G", "Bytes of each rank."),
    ("--tokenizer T", "--tokenizer T", "A folder, .gguf file or hub id; its chat template comes with it."),
    ("--revision v2", "--revision v2", "Of a hub id; so is `--tokenizer-revision`."),
    ("--download-dir D", "--download-dir D", "In place of the hub's own cache."),
    ("--chat-template T", "--chat-template T", "A file, or the template itself."),
    ("--served-model-name a b", "--served-model-name a --served-model-name b", "After MODEL; or each with its flag."),
    ("--api-key k", "--api-key k", "Also `$PLANARIA_API_KEY`. Admin routes have a key of their own."),
    ("--allowed-origins '[\"*\"]'", "--cors-origin *", "Without it no other site's page may call."),
    ("--allowed-methods '[\"GET\"]'", "--cors-method GET", ""),
    ("--allowed-headers '[\"*\"]'", "--cors-header *", ""),
    ("--allow-credentials", "--cors-credentials", ""),
    ("--enforce-eager", "", "No effect, one line says so. A GPU records steps that come again; no start waits for it."),
    ("-q gguf", "--quantization auto", "A GGUF file's packed weights are kept."),
    (
        "-q awq",
        "--quantization auto",
        "And gptq, compressed-tensors, bitsandbytes, fp8, mxfp4: as the checkpoint says.",
    ),
    ("-O3", "", "No effect."),
    ("--compilation-config.mode 3", "", "No effect."),
)
# Options of the same name and meaning.
_SAME = """
    host port api_key served_model_name ssl_keyfile ssl_certfile ssl_ca_certs api_server_count headless dtype seed
    quantization max_num_seqs max_num_batched_tokens block_size enable_prefix_caching async_scheduling
    generation_config skip_tokenizer_init tensor_parallel_size pipeline_parallel_size distributed_executor_backend
    nnodes node_rank master_addr master_port data_parallel_size data_parallel_size_local data_parallel_rank
    data_parallel_start_rank data_parallel_address data_parallel_rpc_port data_parallel_backend
    data_parallel_hybrid_lb data_parallel_external_lb enable_expert_parallel expert_placement_strategy enable_eplb
    eplb_config all2all_backend enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
    disable_nccl_for_dp_synchronization worker_cls worker_extension_cls disable_custom_all_reduce
    max_parallel_loading_workers ray_workers_use_nsight scheduling_policy shutdown_timeout device
    enable_auto_tool_choice tool_call_parser reasoning_parser
"""
SAME = _SAME.split()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def listed(names: str) -> str:
    words = [name.rstrip("!") for name in names.split()]
    return ", ".join(f"`{flag(n)}`" + (f" (use `{INSTEAD[n]}`)" if n in INSTEAD else "") for n in words)


def page() -> str:
    rows = [f"| `{line.code}` | {line.here} |" for line in LINES]
    typed = [
        f"| `{typed}` | `{here}` | {note} |" if here else f"| `{typed}` | | {note} |" for typed, here, note in TYPED
    ]
    same = ", ".join(f"`{flag(name)}`" for name in SAME)
    idle = [f"| {why} | {listed(names)} |" for why, names in WITHOUT_EFFECT.items()]
    absent = [f"| {what} | {listed(names)} |" for what, names in ABSENT.items()]
    neutral = [f"| `{flag(name)}` | {', '.join(sorted({f'`{value}`' for value in values}))} |"
               for name, values in NEUTRAL.items() if name != "max_logprobs"]  # fmt: skip
    names = [f"| `{name}` | `{here}` |" for name, here in VARIABLES.items()]
    return "\n".join([
        "# Coming from vLLM", "",
        "`vllm serve M ...` is `planaria serve M ...`, and `from vllm import LLM` is `from planaria import LLM`. What",
        "follows is made from tables, and tests run every line of it (`pytest tests/pure/test_vllm_words.py",
        "tests/model/test_coming_from_vllm.py`). Every option is in [options](options.md).",
        "", "## Python", "", "`llm` is an `LLM`, `params` a `SamplingParams`, `bar` any class like tqdm's.", "",
        "| in vLLM | here |", "|---|---|", *rows, "",
        "`LLM(...)` takes the options below as keywords.", "",
        "## The command line", "", "| typed | here | |", "|---|---|---|", *typed, "",
        f"The same name and meaning: {same}.", "",
        "### Without effect", "", "Taken; one line names them.", "", "| because | options |", "|---|---|", *idle, "",
        "### Not there yet", "",
        "Refused by name, for answers would differ, unless the value asks for nothing: None, a switch that is off, or",
        "one of the second table.", "", "| what | options |", "|---|---|", *absent, "",
        "| option | values that ask for nothing |", "|---|---|", *neutral, "",
        "## The environment", "", "Not read; one line names those that are set and what does it here.", "",
        "| variable | here |", "|---|---|", *names, "",
    ])  # fmt: skip


@cache
def commands() -> dict[str, Any]:
    return typer.main.get_command(app).commands  # type: ignore[attr-defined, no-any-return]


def translation(command: str = "serve") -> Translation:
    found = commands()[command]
    return Translation(found, typer.Context(found))


def test_the_page_is_that_of_the_tables() -> None:
    assert PAGE.read_text() == page(), WRITE


def test_a_model_is_no_name_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("B", "c"):
        (tmp_path / folder).mkdir()
    (tmp_path / "B/config.json").write_text("{}")
    (tmp_path / "b.gguf").write_bytes(b"")
    for word in ("smollm2", "B", "b.gguf"):
        with pytest.raises(UserError, match=f"{word} comes after --served-model-name.*before options"):
            translation().of(["A", "--served-model-name", "x", word])
        assert translation().of(["A", word, "--served-model-name", "x"])[:2] == ["A", word]
        assert translation().of([word, "--served-model-name", "x", word])[-1] == word, "its own"
        assert translation().of(["A", f"--served-model-name={word}"])[-1] == word
    assert translation().of(["A", "--served-model-name", "x", "c"])[-1] == "c"


@pytest.mark.parametrize(("typed", "here", "note"), TYPED, ids=lambda value: str(value)[:40])
def test_what_is_typed_for_vllm(typed: str, here: str, note: str, tmp_path: Path) -> None:
    found = translation()
    if typed == "--config FILE":
        (tmp_path / "file").write_text(
            "model: M\nport: 1\nenable-prefix-caching: false\nmax_num_seqs: 4\ntrust-remote-code: true\n"
            "served-model-name: [a, b]\nnull-worker: false\nhost: null\n"
        )
        args = found.with_file(["--config", str(tmp_path / "file"), "--port", "2"])
        assert found.of(args) == [
            "M", "--no-enable-prefix-caching", "--max-num-seqs", "4", "--served-model-name", "a",
            "--served-model-name", "b", "--port", "2",
        ]  # fmt: skip
        assert found.notes == ["--trust-remote-code"]
        assert found.of(found.with_file(["N", f"--config={tmp_path / 'file'}"]))[-1] == "N"
        return
    words = [word.strip("'") for word in typed.split()]
    model = [] if "--model" in words else ["M"]
    assert found.of([*model, *words]) == [*model, *here.split()]
    assert bool(found.notes) == (not here)
    assert bool(found.values) == (" half" in typed or typed.startswith("-q"))


def test_options_of_the_same_name_are_there() -> None:
    known = translation().known
    assert not [name for name in SAME if flag(name) not in known]


@pytest.mark.parametrize("name", sorted(WORDS))
def test_every_word_of_vllm_has_its_fate(name: str) -> None:
    word, found = WORDS[name], translation()
    typed = [flag(name)] if word.switch else [flag(name), "something"]
    value = True if word.switch else "something"
    if word.why:
        assert found.of(["M", *typed]) == ["M"] and found.notes[0].startswith(flag(name))
        assert ours({name: value})[1].startswith(f"without effect here: {name}")
        return
    with pytest.raises(ConfigError, match=f"{flag(name)} .*{word.absent}: not there yet"):
        found.of(["M", *typed])
    with pytest.raises(ConfigError, match=f"{name} .*{word.absent}: not there yet"):
        ours({name: value})
    for quiet in (None, *NEUTRAL.get(name, ())):
        assert ours({name: quiet}) == ({}, "")
    if word.switch:
        assert found.of(["M", f"--no-{flag(name)[2:]}"]) == ["M"] and not found.notes


def test_no_word_has_two_meanings() -> None:
    own = {*EngineOptions.__struct_fields__, *ServerConfig.__struct_fields__}
    tables = " ".join([*WITHOUT_EFFECT.values(), *ABSENT.values()]).replace("!", "").split()
    assert len(tables) == len(set(tables)) and not own & {*tables, *RENAMED} and set(RENAMED.values()) <= own
    assert {*NEUTRAL, *INSTEAD} <= set(tables) and not set(SAME) & set(tables) and set(VALUES) <= own


def test_arguments_without_effect_are_named_in_one_line() -> None:
    given = {"trust_remote_code": True, "swap_space": 4, "seed": 0, "quantization": None, "dtype": "half"}
    options, line = ours(given)
    assert options == {"seed": 0, "dtype": "bfloat16"}
    assert line == "without effect here: trust_remote_code, swap_space; dtype half is bfloat16 here"
    assert ours({"scheduling_policy": "priority", "tokenizer": "m"}) == ({"policy": "priority", "tokenizer": "m"}, "")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (
            ["M", "--enable-lora-bias"],
            r"^--enable-lora-bias True: adapters of other kinds: not there yet; leave it out$",
        ),
        (["M", "--max-model-length", "3"], r"no such option; did you mean --max-model-len\?$"),
        (["M", "--lorry"], r"^--lorry: serve has no such option; planaria serve --help lists them$"),
        (["M", "--port"], r"^--port needs a value$"),
        (["M", "--model", "N"], r"^MODEL is given twice, by its place and as --model N"),
        (["M", "--config", "/no/such"], r"^--config /no/such: can't be read"),
        (["M", "--served-model-name", "[abc"], r"^--served-model-name '\[abc': can't be read: JSON is malformed"),
        (["M", "--served-model-name", "[1, [2]]"], r"can't be read: Expected .*got `array`"),
    ],
)
def test_what_cant_be_is_said_by_its_name(args: list[str], says: str) -> None:
    found = translation()
    with pytest.raises(UserError, match=says):
        found.of(found.with_file(args))


def test_a_file_may_have_anything_in_it(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("[" * 600)  # Python 3.11 gives up at some 400
    with pytest.raises(UserError, match="can't be read: maximum recursion depth"):
        translation().with_file(["--config", str(file)])
    file.write_text("port: {on: 2024-01-01}")
    assert translation().with_file(["--config", str(file)]) == ["--port", '{"true": "2024-01-01"}']


def test_a_value_is_no_option() -> None:
    given = ["M", "--prompt", "--enforce-eager", "-p=--lorry", "--", "--x"]
    assert translation("generate").of(given) == ["M", "--prompt", "--enforce-eager", "-p", "--lorry", "--", "--x"]


def test_variables() -> None:
    found = variables({"VLLM_API_KEY": "secret", "VLLM_DP_SIZE": "2", "VLLM_USE_V1": "1", "HOME": "/"})
    assert found == (
        "variables of vLLM are not read: VLLM_API_KEY (here: PLANARIA_API_KEY), VLLM_DP_SIZE (here: PLANARIA_DP_SIZE)"
    )
    assert variables({"PLANARIA_API_KEY": "x"}) == ""
    flags = {option.split()[0] for option in VARIABLES.values() if option.startswith("--")}
    assert flags <= {each.flag for each in options_of(EngineOptions).values()}


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


SAMPLING = """n best_of presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop
    stop_token_ids bad_words ignore_eos max_tokens min_tokens logprobs prompt_logprobs flat_logprobs detokenize
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output truncate_prompt_tokens output_kind
    structured_outputs guided_decoding logit_bias allowed_token_ids extra_args logits_processors
    skip_reading_prefix_cache thinking_token_budget"""


def test_none_is_the_default_of_each_of_vllms_fields() -> None:
    params = SamplingParams(**dict.fromkeys(SAMPLING.split()))  # type: ignore[arg-type]
    assert msgspec.structs.replace(params, max_tokens=16) == SamplingParams()
    params.verify()
    with pytest.raises(RequestError, match="output_kind is not supported yet"):
        SamplingParams(output_kind=1).verify()


def test_parameters_that_are_none_or_lists_as_vllm_takes_them() -> None:
    params = SamplingParams(stop=None, stop_token_ids=[3], bad_words=["a", "b"], seed=None)  # type: ignore[arg-type]
    assert params == SamplingParams(stop_token_ids=(3,), bad_words=("a", "b"))
    params.max_tokens = 5
    assert params.max_tokens == 5


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"n": True}, "n"),
        ({"seed": 1.0}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", None]}, "stop[1]"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"structured_outputs": "json"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a"}, "top_k": 0.5}, "top_k"),
        ({"structured_outputs": StructuredOutputsParams(regex=5)}, "structured_outputs.regex"),  # type: ignore[arg-type]
    ],
)
def test_a_parameter_of_another_type_is_refused_by_its_name(given: dict[str, Any], place: str) -> None:
    """It would be no number to the engine, or none to what sends it to a rank."""
    with pytest.raises(RequestError, match=r"Expected `|must be Struct") as refused:
        SamplingParams(**given).verify()
    assert refused.value.param == place


def test_numbers_of_numpy_are_numbers() -> None:
    params = SamplingParams(seed=np.int64(3), temperature=np.float32(0.5))  # type: ignore[arg-type]
    params.verify()
    assert (type(params.seed), type(params.temperature)) == (int, float)


if __name__ == "__main__":
    PAGE.write_text(page())
