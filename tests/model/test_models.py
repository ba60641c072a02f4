"""Every family against Transformers, on random small checkpoints, in paged and chunked batches."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from planaria.layers.build import build
from planaria.models import model_config
from tests.model.checkpoints import DictSource, config_of, load_reference, write_checkpoint
from tests.model.driver import Driver

TOLERANCE = 1e-4  # of log-probabilities


@dataclass(frozen=True)
class Case:
    """A checkpoint: family, what differs from TINY, and the text lengths it is tried with."""

    name: str
    family: str
    overrides: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (1, 5, 18, 41)
    positions: int | None = None  # length of the rotary tables


def rope(kind: str, **params: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **params}}


LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.5 + 0.5 * i for i in range(8)]}
WINDOW = {"use_sliding_window": True, "sliding_window": 9}
TIED = {"tie_word_embeddings": True}
ORIGINAL = {"original_max_position_embeddings": 32}
LLAMA3 = rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, **ORIGINAL)
YARN = rope("yarn", factor=4.0, **ORIGINAL)
YARN_SCALED = rope("yarn", factor=4.0, mscale=1.2, mscale_all_dim=0.7, truncate=False, **ORIGINAL)
DYNAMIC = rope("dynamic", factor=2.0)
DYNAMIC_LONG = {**DYNAMIC, "max_position_embeddings": 24}
LONGROPE = rope("longrope", **ORIGINAL, **LONG)
LAYERS = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
CASES = [
    Case("llama", "llama"),
    Case("llama-tied", "llama", TIED),
    Case("llama-mha", "llama", {"num_key_value_heads": 4}),
    Case("llama-mqa", "llama", {"num_key_value_heads": 1}),
    Case("llama-groups-of-3", "llama", {"hidden_size": 96, "num_attention_heads": 6}),
    Case("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True}),
    Case("llama-head-dim", "llama", {"head_dim": 32}),
    Case("llama-linear", "llama", rope("linear", factor=3.0)),
    Case("llama-llama3", "llama", LLAMA3),
    Case("llama-yarn", "llama", YARN),
    Case("llama-yarn-scaled", "llama", YARN_SCALED),
    Case("llama-dynamic-short", "llama", DYNAMIC, positions=256),
    Case("llama-dynamic-long", "llama", DYNAMIC_LONG, lengths=(41,), positions=41),
    Case("llama-longrope-short", "llama", LONGROPE, lengths=(1, 5, 18, 32), positions=32),
    Case("llama-longrope-long", "llama", LONGROPE, lengths=(33, 41)),
    Case("mistral", "mistral", {"sliding_window": None}),
    Case("mistral-tied", "mistral", {**TIED, "sliding_window": None}),
    Case("mistral-window", "mistral", {"sliding_window": 7}),
    Case("mistral-head-dim", "mistral", {"head_dim": 32, "sliding_window": 16}),
    Case("qwen2", "qwen2"),
    Case("qwen2-tied", "qwen2", TIED),
    Case("qwen2-window", "qwen2", {**WINDOW, "max_window_layers": 1}),
    Case("qwen2-yarn", "qwen2", YARN),
    Case("qwen3", "qwen3", {"head_dim": 32}),
    Case("qwen3-tied-bias", "qwen3", {**TIED, "head_dim": 16, "attention_bias": True}),
    Case("qwen3-window-layers", "qwen3", {**LAYERS, "head_dim": 16}),
]
BY_NAME = {case.name: case for case in CASES}
GENERATED = ["llama-tied", "llama-llama3", "mistral-window", "qwen2-window", "qwen3-window-layers"]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Matrices this small gain nothing from two, and on busy cores each operation would wait for both."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], tuple[Path, Any]]:
    """The folder of a case and Transformers' model of it, made once."""
    made: dict[str, tuple[Path, Any]] = {}

    def get(case: Case) -> tuple[Path, Any]:
        if case.name not in made:
            folder = write_checkpoint(tmp_path_factory.mktemp(case.name), case.family, **case.overrides)
            made[case.name] = folder, load_reference(folder)
        return made[case.name]

    return get


def texts(case: Case, vocabulary: int = 131) -> list[list[int]]:
    draw = random.Random(case.name)
    return [[draw.randrange(vocabulary) for _ in range(length)] for length in case.lengths]


def expected(reference: Any, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = reference(torch.tensor([tokens])).logits[0]
    return logits


def distance(logits: Tensor, reference: Tensor) -> float:
    assert logits.shape == reference.shape
    return float((logits.log_softmax(-1) - reference.log_softmax(-1)).abs().max())


def make_model(case: Case, folder: Path, ops: Any) -> Any:
    config = model_config(config_of(folder))
    return build(config, DictSource.open(folder), ops, quantization="keep", max_positions=case.positions)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_equal_those_of_transformers(case: Case, checkpoint: Any, make_ops: Any) -> None:
    folder, reference = checkpoint(case)
    ops = make_ops()
    model = make_model(case, folder, ops)
    prompts = texts(case)
    wanted = [expected(reference, prompt) for prompt in prompts]
    assert min(float(w.std()) for w in wanted) > 0.5  # else a wrong model could pass

    alone = Driver(model, ops, block_size=16)
    for i, prompt in enumerate(prompts):
        assert distance(alone.whole(i, prompt), wanted[i]) < TOLERANCE

    together = Driver(model, ops, block_size=16, seed=1)
    found = together.step(dict(enumerate(prompts)))
    for i, want in enumerate(wanted):
        assert distance(found[i], want) < TOLERANCE

    # Chunks of different sizes, so that whole prompts, chunks and single tokens share a step.
    mixed = Driver(model, ops, block_size=16, seed=2)
    left = dict(enumerate(prompts))
    parts: dict[int, list[Tensor]] = {i: [] for i in left}
    step = 0
    while left:
        feed = {i: tokens[: (1, 7, 3)[(i + step) % 3]] for i, tokens in reversed(left.items())}
        for i, logits in mixed.step(feed).items():
            parts[i].append(logits)
        left = {i: tokens[len(feed[i]) :] for i, tokens in left.items() if len(tokens) > len(feed[i])}
        step += 1
    for i, want in enumerate(wanted):
        assert distance(torch.cat(parts[i]), want) < TOLERANCE


@pytest.mark.parametrize("name", GENERATED)
def test_greedy_tokens_equal_those_of_transformers(name: str, checkpoint: Any, make_ops: Any) -> None:
    case, new = BY_NAME[name], 24
    folder, reference = checkpoint(case)
    ops = make_ops()
    driver = Driver(make_model(case, folder, ops), ops, block_size=16)
    prompts = texts(case)
    feed = dict(enumerate(prompts))
    got: dict[int, list[int]] = {i: [] for i in feed}
    for _ in range(new):
        for i, logits in driver.step(feed).items():
            got[i].append(int(logits[-1].argmax()))
        feed = {i: tokens[-1:] for i, tokens in got.items()}
    for i, prompt in enumerate(prompts):
        # Its choice after the prompt and each of our tokens: the same as its own greedy continuation.
        choices = expected(reference, prompt + got[i][:-1])[len(prompt) - 1 :].argmax(-1)
        assert got[i] == choices.tolist()


def test_a_step_that_wants_no_logits_fills_the_cache(checkpoint: Any, make_ops: Any) -> None:
    case = BY_NAME["qwen2-window"]
    folder, reference = checkpoint(case)
    ops = make_ops()
    driver = Driver(make_model(case, folder, ops), ops, block_size=16)
    tokens = texts(case)[-1]
    nothing = driver.step({0: tokens[:-3]}, wanted=[])
    assert nothing[-1].shape == (0, 131)
    assert distance(driver.step({0: tokens[-3:]})[0], expected(reference, tokens)[-3:]) < TOLERANCE


@pytest.mark.parametrize("early", [True, False])
def test_the_last_layer_goes_on_with_what_is_wanted(
    early: bool, checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its three products after attention have those rows alone, and the same numbers."""
    pytest.importorskip("llvmlite")
    from planaria.kernels.cpu import layout
    from planaria.kernels.cpu.ops import CpuOps
    from planaria.kernels.cpu.recorded import RecordedOps

    case, rows, linear = BY_NAME["qwen3"], list[int](), RecordedOps.linear
    folder, reference = checkpoint(case)

    def noted(self: Any, x: Any, *rest: Any, **named: Any) -> Any:
        self.early = self.early and early
        rows.append(x.rows)
        return linear(self, x, *rest, **named)

    monkeypatch.setattr(RecordedOps, "linear", noted)
    ops = CpuOps("float32", 1)
    driver, prompts = Driver(make_model(case, folder, ops), ops, block_size=16), texts(case)
    assert set(rows[:-3]) == {layout.ROWS_TOKENS}
    assert set(rows[-3:]) == {layout.ROWS_SAMPLES if early else layout.ROWS_TOKENS}
    found = driver.step(dict(enumerate(prompts[:3])), wanted=[1])[1]
    assert distance(found, expected(reference, prompts[1])) < TOLERANCE
    ops.close()


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_bfloat16_stays_near_float32(name: str, checkpoint: Any, make_ops: Any) -> None:
    case = BY_NAME[name]
    folder, reference = checkpoint(case)
    ops = make_ops("bfloat16")
    driver = Driver(make_model(case, folder, ops), ops, block_size=16)
    for i, prompt in enumerate(texts(case)):
        got, want = driver.whole(i, prompt).log_softmax(-1), expected(reference, prompt).log_softmax(-1)
        assert float((got - want).abs().mean()) < 0.05


def test_configurations_are_read_without_torch() -> None:
    code = (
        "import sys; from planaria.models import model_config; "
        "model_config({'architectures': ['LlamaForCausalLM'], 'hidden_size': 64, 'num_attention_heads': 4, "
        "'intermediate_size': 96, 'num_hidden_layers': 2, 'vocab_size': 9, 'max_position_embeddings': 64}); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
