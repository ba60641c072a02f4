"""How often a step waits for its device: counted by a stand-in for one, with kernels that do nothing.

What waits is what brings values to the host, and what copies from memory that isn't pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu import Streams
from planaria.kernels.gpu import attention, graphs
from planaria.kernels.gpu.draw import Drawer, DrawnTokens
from planaria.kernels.gpu.ops import GpuOps
from planaria.kernels.share import BatchShare
from planaria.layers.build import build
from planaria.mesh.comm import Solo
from planaria.mesh.mesh import Mesh
from planaria.models import model_config
from planaria.models.deal import deal
from planaria.protocol import StepResult
from planaria.topology.stripes import Context
from planaria.worker.sampler import Follower
from planaria.worker.stage import Stage
from tests.model.driver import Driver
from tests.model.gpu_cases import MIXTURE, SMALL, UNWINDOWED, FakeRecorder, adapted
from tests.model.random_source import RandomSource
from tests.model.test_deepseek import SPARE

triton = pytest.importorskip("triton", reason="Triton is not installed: there is none for this platform")

READS = ("cpu", "item", "tolist", "__bool__", "__int__", "__float__", "__index__")
COPIES = ("from_numpy", "tensor", "as_tensor")
LOOKS = ("nonzero", "_local_scalar_dense", "masked_select", "bincount", "_unique2", "unique_dim")

GPT_OSS: dict[str, Any] = {
    **UNWINDOWED, "architectures": ["GptOssForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2,
    "sliding_window": 9,
}  # fmt: skip
LATENT = {
    **SPARE, "first_k_dense_replace": 1, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
WIDE = {**MIXTURE, "architectures": ["OlmoeForCausalLM"], "num_key_value_heads": 3}


class Waits(TorchDispatchMode):
    """Names of what waited, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()
        self._methods = [(torch.Tensor, name) for name in READS] + [(torch, name) for name in COPIES]
        self._own: list[Any] = []

    def __enter__(self) -> Waits:
        self._own = [getattr(where, name) for where, name in self._methods]
        for (where, name), own in zip(self._methods, self._own, strict=True):
            setattr(where, name, self._counted(name, own))
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for (where, name), own in zip(self._methods, self._own, strict=True):
            setattr(where, name, own)

    def _counted(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **named: Any) -> Any:
            if name in READS or not isinstance(args[0], torch.Tensor):
                self.found.append(name)
            with torch._C._DisableTorchDispatch():
                return own(*args, **named)

        return call

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.overloadpacket.__name__
        by_mask = name in ("index", "index_put", "index_put_") and any(
            each is not None and each.dtype == torch.bool for each in args[1]
        )
        # beside the host, but by way of memory that isn't pinned, where it is of parts of rows
        by_way = name == "copy_" and args[2:] == (True,) and not all(each.is_contiguous() for each in args[:2])
        if name in LOOKS or by_mask or by_way:
            self.found.append(name)
        return op(*args, **(kwargs or {}))


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that do nothing, steps that are recorded when they come a second time."""
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "run", lambda *_, **__: None)
    monkeypatch.setattr(attention, "_WAYS", (("Triton", lambda need: "", attention.by_triton),))
    monkeypatch.setattr(graphs, "OFTEN", 1)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "windows": (SMALL, {}), "adapters": (UNWINDOWED, {"adapts": True}), "experts": (MIXTURE, {}),
    "stage 0": (SMALL, {"stage": 0, "stages": 2}), "stage 1": (SMALL, {"stage": 1, "stages": 2}),
    "experts with biases": (GPT_OSS, {}), "latent attention, groups of experts": (LATENT, {}),
    "norms over all heads": (WIDE, {}), "q4_1": (SMALL, {"kind": "q4_1"}),
}  # fmt: skip


def steps(
    config: dict[str, Any], *, stage: int = 0, stages: int = 1, adapts: bool = False, kind: str | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Of one step after the other: what it is, and what it waited for."""
    own, ops, waits = model_config(config), GpuOps("cpu", "float32"), Waits()
    ops.recorder = FakeRecorder()
    ops._shared = lambda x: x  # type: ignore[method-assign]  # as on a device
    model = build(own, RandomSource(kind), ops, quantization="keep", shard=deal(own, 1, stages)[stage])
    model.count_experts()
    driver = Driver(model, adapted(model, ops) if adapts else ops, block_size=16)
    assert ops.choose_attention(layer.attention.kind for layer in model.layers) == ["Triton"]
    chosen, run, driver.adapters = dict(ops.ways), driver.run, {0: 2} if adapts else {}

    def counted() -> Any:
        with waits:
            return run()

    driver.run = counted
    text = {0: [1, 2, 3], 1: [4]}
    for name, feed in {"prompt": text, **{f"step {i}": {0: [5], 1: [6]} for i in range(3)}, "drafts": text}.items():
        driver.batch.prefill, waits.found = name == "prompt", []
        driver.batch.arrived = torch.zeros(sum(map(len, feed.values())), own.hidden_size) if stage else None
        driver.step(feed)
        yield name, waits.found
    driver.step(text)
    assert ops.recorder.played >= 3 and ops.ways == chosen


@pytest.mark.parametrize("case", CASES)
def test_a_forward_pass_waits_for_nothing(nothing: None, case: str) -> None:
    config, options = CASES[case]
    assert {name: found for name, found in steps(config, **options) if found and name != "prompt"} == {}


class OneOfTwo(Solo):
    """A rank of two that compute shares of a step."""

    size = 2

    def all_reduce(self, x: Any) -> None:
        """The other has nothing."""


@pytest.mark.parametrize("rank", [0, 1])
def test_a_share_of_a_step_waits_for_nothing(nothing: None, rank: int) -> None:
    """Of several tokens, and of one or none."""
    own, ops, waits = model_config(MIXTURE), GpuOps("cpu", "float32"), Waits()
    ops._shared = lambda x: x  # type: ignore[method-assign]  # as on a device
    ops.join(Solo(), cp=OneOfTwo())
    shard = deal(own, 1, 1, context=Context(pcp=2, pcp_rank=rank))[0]
    model = build(own, RandomSource(None), ops, quantization="keep", shard=shard)
    model.count_experts()
    driver = Driver(model, ops, block_size=16)
    share = BatchShare(driver.batch, rank, 2)
    run = ops.compile(model.forward, share)

    def counted() -> Any:
        share.deal()
        with waits:
            found = run()
        samples = int(driver.batch.counts[2])
        assert len(found) == (0 if rank else samples)
        return torch.zeros(samples, own.vocab_size)

    driver.run = counted
    driver.step({0: [1, 2]})  # the first one puts where experts are on the device
    waits.found = []
    for feed in ({0: [1, 2, 3], 1: [4]}, {0: [5], 1: [6]}, {0: [7]}):
        driver.step(feed)
    assert waits.found == []


def test_what_waits_is_counted() -> None:
    x = torch.arange(4)
    with Waits() as waits:
        x.cpu(), x[x > 2], x.nonzero(), x[1].item(), bool(x[0]), torch.tensor([1.0]), x.tolist()
        x + 1, x[1:], x.sum(), torch.zeros(3), x.to(torch.float32), x[torch.zeros(2, dtype=torch.int64)]
        rows = torch.zeros(2, 4)
        rows[:, :2].copy_(rows[:, 2:], non_blocking=True)
        rows[0].copy_(rows[1], non_blocking=True), rows[:, :2].copy_(rows[:, 2:])
    assert waits.found == ["cpu", "index", "nonzero", "item", "__bool__", "tensor", "tolist", "copy_"]


class Two(Solo):
    """A rank of two, on a device."""

    size, device = 2, "meta"

    def __init__(self, rank: int = 0) -> None:
        super().__init__(rank)
        self.rank = rank

    def check(self) -> None:
        pass

    def gather_columns(self, x: Any, columns: range, size: int) -> Any:
        return torch.cat([x, x.new_zeros(len(x), size - len(columns))], 1)


@pytest.mark.parametrize("tp", [Solo(), Two()], ids=["alone", "two ranks"])
def test_a_step_of_an_engine_waits_once(nothing: None, tp: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its tokens, drawn once: in a recording, or in one of their own, or in none."""
    own, ops, draw, drew_with = model_config(SMALL), GpuOps("cpu", "float32", tp), Drawer.draw, list[Any]()

    def noted(drawer: Drawer, *given: Any, **named: Any) -> None:
        drew_with.append(drawer)
        draw(drawer, *given, **named)

    monkeypatch.setattr(Drawer, "draw", noted)
    streams, waits = engine(ops, own, monkeypatch)
    found = list[tuple[int, list[str]]]()
    for _ in range(6):
        waits.found = []
        with waits:
            drew, _ = streams.step()
        found.append((drew, waits.found))
    assert found == [(5, ["tokens"])] * 6 and drew_with.count(ops.drawer) == 6, found
    whole, choices = (each.ready for each in ops.graphs)
    assert [shape.draws for shape in whole] == [tp.size == 1] and [shape.draws for shape in choices] == [True] * (
        tp.size - 1
    )
    assert ops.recorder is not None and ops.recorder.played == 4 + (tp.size - 1) * 3  # type: ignore[attr-defined]


def engine(ops: GpuOps, own: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Streams, Waits]:
    """Five streams, and what counts waits, also for tokens."""
    waits, read = Waits(), DrawnTokens.read

    def counted(drawn: DrawnTokens) -> Any:
        waits.found.append("tokens")
        return read(drawn)

    monkeypatch.setattr(DrawnTokens, "read", counted)
    ops.recorder = FakeRecorder()
    ops.drawer_of(5, own.vocab_size, ops.tp if isinstance(ops.tp, Two) else None)
    model = build(own, RandomSource(), ops, quantization="keep")
    model.make_kv(5 * 128 // 16, 16)
    return Streams(ops, model.forward, 5, own.vocab_size, 128), waits


@pytest.mark.parametrize("tp", [Solo(), Two(0), Two(1)], ids=["alone", "draws for two", "is told"])
def test_a_step_begins_before_the_last_one_is_waited_for(
    nothing: None, tp: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, ops = model_config(SMALL), GpuOps("cpu", "float32", tp)
    streams, waits = engine(ops, own, monkeypatch)
    runner, core, under_way = streams.runner, streams.core, list[Any]()
    runner.stage = Stage(runner.batch, runner.stage.forward, Mesh(tp.rank, tp))
    if not runner.stage.samples:
        runner.sampler = Follower(5, own.vocab_size, ops.drawer)
    for number in range(8):
        plan = core.plan(0.0)
        assert plan is not None
        waits.found = []
        with waits:
            under_way.append((plan, runner.begin(plan.step, plan.lanes[0], plan.freed_rows[0], ahead=True)))
        assert waits.found == [] and runner.batch.follows == (number > 0), number
        if number:
            before, drawing = under_way.pop(0)
            with waits:
                core.commit(StepResult(before.epoch, before.step, (drawing.result(),)))
            assert waits.found == ["tokens"]
    assert ops.recorder is not None and ops.recorder.played > 4  # type: ignore[attr-defined]
