"""Kernels for GPUs against their definitions, which run on the CPU: `python -m tests.model.gpu_cases [cuda] X`; without
a device in Triton's interpreter, on the CPU too.

A process of its own, for Triton reads the switch when it is imported. Each of CASES raises what is wrong.
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from planaria.config.options import CacheConfig, LoRAConfig, SchedulerConfig
from planaria.core.engine import EngineCore
from planaria.kernels.blocks import PACKED
from planaria.kernels.gpu import attention, fused
from planaria.kernels.gpu import draw as draw_module
from planaria.kernels.gpu import graphs as model_graphs
from planaria.kernels.gpu.draw import Drawer
from planaria.kernels.gpu.ops import GpuOps
from planaria.kernels.gpu.packed import FEW_ROWS, pack
from planaria.kernels.ops import Batch, Quantized
from planaria.kernels.quant import dequantise
from planaria.kernels.reference import SlotKV, SlotLatents, StepTensors, TorchOps
from planaria.layers.build import build
from planaria.mesh.comm import Solo
from planaria.mesh.mesh import Mesh
from planaria.models import model_config
from planaria.models.deal import deal
from planaria.models.linears import linears
from planaria.models.shard import ContextGroup
from planaria.protocol import Fresh, LaneResult, LoraModule, PutLora, StepPlan, StepResult
from planaria.topology.stripes import Stripes
from planaria.types import Request, SamplingParams
from planaria.worker.loras import Loras
from planaria.worker.runner import Runner
from planaria.worker.sampler import Follower, Sampler
from planaria.worker.stage import Stage
from planaria.worker.torch_sampler import TorchSampler
from tests.model.driver import Driver
from tests.model.random_source import RandomSource

NEAR = {"float32": 2e-5, "bfloat16": 3e-2}
BLOCKS = 24
DEVICE = torch.device("cpu")  # that the kernels run on


def same(found: Tensor, wanted: Tensor, dtype: str, what: object) -> None:
    gap = float((found.float().cpu() - wanted.float()).abs().max())
    assert gap < NEAR[dtype] * max(1.0, float(wanted.float().abs().max())), (what, gap)
    assert float(wanted.float().abs().max()) > 0.1, what


def step_of(sequences: list[tuple[int, int]], page: int, stripes: Stripes | None = None) -> Batch:
    """new tokens and all tokens of each sequence."""
    batch = Batch(256, 8, BLOCKS, 8)
    free = random.Random(0).sample(range(BLOCKS), BLOCKS)
    at, whole = 0, page * (stripes.size if stripes is not None else 1)
    for i, (new, length) in enumerate(sequences):
        needed = -(-length // whole)
        batch.block_table[i, :needed], free = free[:needed], free[needed:]
        batch.positions[at : at + new] = np.arange(length - new, length)
        batch.seq_start[i : i + 2] = at, at + new
        batch.seq_len[i], batch.seq_row[i], at = length, i, at + new
    batch.counts[:3] = at, len(sequences), 0
    return batch


def attend(
    dtype: str = "float32", heads: tuple[int, int] = (6, 2), dim: int = 24, page: int = 16,
    sequences: list[tuple[int, int]] | None = None, window: int | None = None, cap: float = 0.0, sunk: bool = False,
    rank: int = 0, stripes: Stripes | None = None, split: int = 64,
) -> None:  # fmt: skip
    attention.SPLIT = split
    batch = step_of(sequences or [(1, 150), (3, 40), (1, 1)], page, stripes)
    torch.manual_seed(0)
    ops, plain = GpuOps(DEVICE.type, dtype), TorchOps("cpu", dtype)
    ops._block_size = page
    places = ops.places(batch)
    ops._step, plain._step = ops.begin(batch, places), StepTensors(batch, plain.device)
    tokens = int(batch.counts[0])
    q = torch.randn(tokens, heads[0] * dim).to(ops.dtype)
    slots = BLOCKS * page
    sinks, more = torch.randn(heads[0]) if sunk else None, tuple[Any, ...]()
    if rank:
        rows = torch.randn(slots, dim).to(ops.dtype)
        caches: list[Any] = [SlotLatents(rows.to(each.device), page) for each in (ops, plain)]
        arguments: tuple[Any, ...] = heads[0], rank, 0.2
        name = "mla_attend"
    else:
        keys, values = (torch.randn(slots, heads[1], dim).to(ops.dtype) for _ in range(2))
        caches = [SlotKV(keys.to(each.device), values.to(each.device), page) for each in (ops, plain)]
        arguments, name, more = (*heads, dim, 0.2), "attend", (window, cap)
    name, last = (f"{name}_part", [ContextGroup(stripes, range(heads[0]), range(heads[1]))]) if stripes else (name, [])
    if not rank and not stripes:
        more = (*more, sinks)
    found, wanted = (
        getattr(each, name)(q.to(each.device), cache, *arguments, *last, *(there(x, each.device) for x in more)).cpu()
        for each, cache in zip((ops, plain), caches, strict=True)
    )
    if stripes is not None:
        width = (rank or dim) + 2
        seen = wanted.view(-1, width)[:, -1] > 0  # of who sees nothing here, only that is told
        assert torch.equal(seen, found.view(-1, width)[:, -1] > 0)
        found, wanted = found.view(-1, width)[seen], wanted.view(-1, width)[seen]
    assert [way.name for way in ops.ways.values()] == ["Triton"]
    same(found, wanted, dtype, (heads, dim, page, window, cap, sunk, rank, stripes))


def there(x: Any, device: torch.device = torch.device("cpu")) -> Any:
    """On a device, if it is a tensor."""
    return x.to(device) if isinstance(x, Tensor) else x


def attention_few() -> None:
    attend()
    attend("bfloat16", heads=(4, 4), dim=32, window=20, cap=5.0, sunk=True)
    attend(heads=(5, 1), dim=24, rank=16, sequences=[(1, 70), (20, 33)])
    attend(heads=(4, 2), stripes=Stripes(2, 1, 4), sequences=[(1, 200), (2, 9)])


def attention_many() -> None:
    mixed = [(1, 150), (33, 40), (2, 7), (9, 9)]
    for dtype in NEAR:
        for heads, dim in (((1, 1), 16), ((3, 3), 40), ((9, 3), 64), ((32, 2), 80), ((20, 1), 128)):
            for page in (16, 48):
                attend(dtype, heads, dim, page, mixed)
        for window, cap, sunk in ((1, 0.0, False), (30, 0.0, True), (None, 3.0, False), (None, 0.0, True)):
            attend(dtype, sequences=mixed, window=window, cap=cap, sunk=sunk)
            attend(dtype, sequences=mixed, window=window, cap=cap, sunk=sunk, split=1 << 20)
        for heads, dim, rank in (((4, 1), 24, 16), ((20, 1), 36, 20), ((2, 1), 144, 130)):
            attend(dtype, heads, dim, rank=rank, sequences=mixed)
            attend(dtype, heads, dim, rank=rank, sequences=mixed, stripes=Stripes(2, 0, 1))
        for ranks, interleave in ((2, 1), (3, 4), (2, 16)):
            for place in range(ranks):
                attend(dtype, sequences=mixed, stripes=Stripes(ranks, place, interleave), window=25, cap=4.0)


def norms(widths: tuple[int, ...] = (48, 33), rows: tuple[int, ...] = (3, 0)) -> None:
    for dtype in NEAR:
        plain = TorchOps("cpu", dtype)
        for width in widths:
            for count in rows:
                x, y, weight = torch.randn(count, width), torch.randn(count, width).to(plain.dtype), torch.rand(width)
                residual, by = x.clone().to(DEVICE), weight.to(DEVICE)
                if count:
                    found = fused.rms_norm(residual, by, 1e-5, plain.dtype)
                    same(found, plain.rms_norm(x, weight, 1e-5), dtype, width)
                found = fused.rms_norm(residual, by, 1e-5, plain.dtype, y.to(DEVICE))
                assert torch.equal(residual.cpu(), x + y)
                if count:
                    same(found, plain.rms_norm(x + y, weight, 1e-5), dtype, width)


def ropes(cases: tuple[tuple[int, int, int, int], ...] = ((3, 1, 20, 16), (2, 2, 32, 32))) -> None:
    """heads, kv_heads, dim, rotated."""
    for dtype in NEAR:
        for heads, kv_heads, dim, rotated in cases:
            for q_norm, k_norm in ((None, None), (torch.rand(dim), torch.rand(dim))):
                plain, batch = TorchOps("cpu", dtype), step_of([(2, 9), (4, 4)], 16)
                batch.slots[:6] = 5, 40, 7, -1, 9, 100
                plain._step = StepTensors(batch, plain.device)
                rope = torch.randn(64, rotated // 2), torch.randn(64, rotated // 2)
                qkv = torch.randn(6, (heads + 2 * kv_heads) * dim).to(plain.dtype)
                zeros = torch.zeros(4, 128, kv_heads, dim, dtype=plain.dtype)
                caches = [SlotKV(zeros[i], zeros[i + 1], 16) for i in (0, 2)]
                wanted = plain.rope_store(qkv, caches[0], rope, heads, kv_heads, dim, q_norm, k_norm, 1e-6)
                places = torch.tensor(batch.positions[:6]), torch.tensor(batch.slots[:6], dtype=torch.int32)
                kept = caches[1].keys.to(DEVICE), caches[1].values.to(DEVICE)
                given, turn, at = qkv.to(DEVICE), *((a.to(DEVICE), b.to(DEVICE)) for a, b in (rope, places))
                by = there(q_norm, DEVICE), there(k_norm, DEVICE)
                found = fused.rope_store(given, kept, turn, at, heads, kv_heads, dim, *by, 1e-6)
                same(found, wanted, dtype, dim)
                same(kept[0], caches[0].keys, dtype, dim)
                assert torch.equal(kept[1].cpu(), caches[0].values)


def gates(widths: tuple[int, ...] = (40, 1)) -> None:
    for dtype in NEAR:
        plain = TorchOps("cpu", dtype)
        for kind in fused.KINDS:
            for width in widths:
                both = (torch.randn(4, 2 * width) * 4).to(plain.dtype)
                same(fused.gated(both.to(DEVICE), kind, plain.dtype), plain.gated(both, kind), dtype, (kind, width))


def quantised(kind: str, rows: int, columns: int, skip: int) -> Quantized:
    """Random codes and small scales."""
    own, draw = PACKED[kind], np.random.default_rng(0)
    blocks = -(-(columns + skip) // own.elements)
    data = draw.integers(0, 256, (rows, blocks, own.nbytes), np.uint8)
    for at in (own.scale, own.minimum):
        if at is not None:
            data[..., at : at + 2] = (
                (draw.uniform(0.01, 0.02, (rows, blocks)) * (256 if own.float8 else 1))
                .astype(np.float16)[..., None]
                .view(np.uint8)
            )
    if own.float8:
        data[..., 2:][data[..., 2:] & 127 == 127] = 1  # which are no numbers
    return Quantized(kind, data.reshape(rows, -1), (rows, columns), skip)


def packed(kind: str, dtype: str, rows: int = 37, columns: int = 320, skip: int = 32, tokens: int = 3) -> None:
    weight, ops = quantised(kind, rows, columns, skip), TorchOps("cpu", dtype)
    bias = np.random.default_rng(1).normal(size=rows).astype(np.float32)
    found, values = pack(weight, bias, ops.dtype, DEVICE), torch.from_numpy(dequantise(weight)).to(ops.dtype)
    same(found.weight, values, dtype, kind)
    some = torch.tensor([rows - 1, 0], dtype=torch.int32, device=DEVICE)
    assert torch.equal(found.rows(some), found.weight[some])
    x = torch.randn(tokens, columns).to(ops.dtype) / columns**0.5
    wanted = torch.nn.functional.linear(x.float(), values.float(), torch.from_numpy(bias))
    same(found.product(x.to(DEVICE)), wanted, dtype, (kind, tokens))
    if tokens <= FEW_ROWS:
        exact = found.product(x.to(DEVICE), torch.float32)
        assert exact.dtype == torch.float32
        same(exact, wanted, dtype, (kind, tokens))


def packed_few() -> None:
    for number, kind in enumerate(PACKED):
        packed(kind, [*NEAR][number % 2], rows=9, columns=96, skip=32 if number % 3 else 0)


def packed_many() -> None:
    for kind in PACKED:
        for dtype in NEAR:
            for tokens in (1, 17, 40, 65):
                packed(kind, dtype, tokens=tokens, skip=0 if tokens == 1 else 64)


SMALL: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100,
    "max_position_embeddings": 128, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
}  # fmt: skip


def logits(ops: TorchOps, kind: str | None, config: dict[str, Any], long: int) -> Tensor:
    """Of two texts, whole, then of a token more of each."""
    driver = Driver(build(model_config(config), RandomSource(kind), ops, quantization="keep"), ops, block_size=16)
    draw = random.Random(0)
    parts = [driver.step({0: [1], 1: [draw.randrange(100) for _ in range(long)]}), driver.step({0: [7], 1: [8]})]
    return torch.cat([each for part in parts for each in part.values()]).log_softmax(-1)


def whole_model(
    dtypes: tuple[str, ...] = ("float32",), kinds: tuple[str | None, ...] = (None,), long: int = 12
) -> None:
    """A window in one layer; a residual's sums on the way of its norm."""
    for dtype in dtypes:
        for kind in kinds:
            made = GpuOps(DEVICE.type, dtype), TorchOps("cpu", dtype)
            found, wanted = (logits(each, kind, SMALL, long).cpu() for each in made)
            gap = (found - wanted).abs()
            assert float(gap.max() if dtype == "float32" else gap.mean()) < (1e-4 if dtype == "float32" else 0.05), gap


class FakeRecorder:
    """Plays by doing it; as with a real one nothing is computed before. Triton's interpreter has room for one
    thread."""

    beside = False

    def __init__(self) -> None:
        self.played = 0

    def enter(self) -> None:
        pass

    def record(self, work: Callable[[], Tensor]) -> tuple[Callable[[], None], Any]:
        out = dict[Any, Tensor]()

        def play() -> None:
            self.played += 1
            with torch.inference_mode():
                out["last"] = work()

        return play, Played(out)


class Played:
    """Cut as a tensor is."""

    def __init__(self, out: dict[Any, Tensor]) -> None:
        self.out = out

    def __getitem__(self, lines: Any) -> Tensor:
        return self.out["last"][lines]

    def contiguous(self) -> Tensor:
        return self.out["last"]


UNWINDOWED = {name: value for name, value in SMALL.items() if "window" not in name}
MIXTURE = {
    **UNWINDOWED, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 6, "num_experts_per_tok": 2,
    "moe_intermediate_size": 48, "norm_topk_prob": True,
}  # fmt: skip


def adapted(model: Any, ops: TorchOps) -> Loras:
    """Two adapters of random numbers, in slots 0 and 2 of 3."""
    dice = np.random.default_rng(0)
    loras = Loras(LoRAConfig(max_loras=3, max_lora_rank=8), model.config, ops, model)
    for slot, rank in ((0, 8), (2, 3)):
        modules = []
        for name, (rows, columns) in linears(model.config).items():
            a, b = (dice.normal(0, 0.3, size).astype(np.float32).tobytes() for size in (rank * columns, rows * rank))
            modules.append(LoraModule(name, rank, 0.5, "f32", a, b))
        loras.put(PutLora(slot, f"{slot}", tuple(modules), first=True, last=True))
    return loras


def twice(config: dict[str, Any], stage: int = 0, stages: int = 1) -> Iterator[tuple[Any, Any]]:
    """A model, or a stage of it, whose steps are recorded when they come a second time, and one by the definition."""
    own, ops = model_config(config), GpuOps("cpu", "float32")
    ops.recorder, model_graphs.OFTEN = FakeRecorder(), 1
    for each in (ops, TorchOps("cpu", "float32")):
        yield each, build(own, RandomSource(), each, quantization="keep", shard=deal(own, 1, stages)[stage])


def recorded(config: dict[str, Any], *, stage: int = 0, stages: int = 1, adapts: bool = False) -> Any:
    """Steps of several shapes, with rows and tokens that recordings have and these lack: played, they give the same."""
    made = list(twice(config, stage, stages))
    drivers = [Driver(model, adapted(model, ops) if adapts else ops, block_size=16) for ops, model in made]
    ops = made[0][0]
    feeds: list[dict[int, list[int]]] = [{i: [i + 1, 5] for i in range(3)}, *[{0: [3], 1: [4], 2: [5]}] * 2]
    feeds += [{0: [1, 2], 1: [9], 2: [8, 9]}] * 2 + [{2: [4], 0: [1]}] * 2
    for number, feed in enumerate(feeds):
        came = torch.randn(sum(map(len, feed.values())), config["hidden_size"])
        for driver in drivers:
            driver.batch.prefill, driver.adapters = number == 0, {0: 2, 2: 0} if adapts else {}
            driver.batch.arrived = came.clone() if stage else None
        found, wanted = (driver.step(feed) for driver in drivers)
        for i in feed:
            same(found[i], wanted[i], "float32", (number, i))
    assert ops.recorder.played == 3, (ops.recorder.played, ops.graphs[-2].ready)
    assert {(shape.rows, shape.each) for shape in ops.graphs[-2].ready} == {(4, 1), (4, 2), (2, 1)}
    return ops


def graphs() -> None:
    """Of a layer with a window; one without is in `graphs_further`."""
    ops = recorded({**SMALL, "num_hidden_layers": 1, "max_window_layers": 0})
    made = list(ops.graphs)
    ops.join(Solo())
    assert not any(each.ready for each in made) and not ops.graphs


def graphs_further() -> None:
    """Of stages, the last of steps in which rows have adapters."""
    recorded(SMALL, stage=0, stages=2)
    recorded(SMALL, stage=1, stages=2, adapts=True)


def graphs_many() -> None:
    """Rows that have adapters, or choose experts, in recordings of several shapes."""
    recorded(SMALL, stage=1, stages=2)
    for config, adapts in ((UNWINDOWED, True), (MIXTURE, False)):
        recorded({**config, "num_hidden_layers": 1}, adapts=adapts)


def moved_experts() -> None:
    """A recording finds experts where they are by now, and counts only tokens that are somebody's."""
    made = list(twice({**MIXTURE, "num_hidden_layers": 1}))
    loads = [model.count_experts() for _, model in made]
    drivers = [Driver(model, ops, block_size=16) for ops, model in made]
    for number in range(4):
        found, wanted = (driver.step({i: [number + i] for i in range(3)}) for driver in drivers)
        for i in found:
            same(found[i], wanted[i], "float32", (number, i))
        for ops, model in made if number == 2 else ():
            for block in model.blocks:
                block.place(ops, [3, 1, 2, 0, 5, 4], range(6))
    ops = made[0][0]
    ops.read_loads()
    assert ops.recorder.played == 3 and (loads[0] == loads[1]).all() and loads[0].sum() == 4 * 3 * 2, loads


def adapters(sizes: tuple[int, ...] = (4,)) -> None:
    """Products of rows with and without, with parts that adapters leave out."""
    for dtype in NEAR:
        made = GpuOps(DEVICE.type, dtype), TorchOps("cpu", dtype)
        for parts, width in (((range(40), range(40, 72), range(72, 91)), 48), ((range(64),), 33)):
            tables: list[Any] = [each.lora_table(parts, 20, 3) for each in made]
            dice = np.random.default_rng(0)
            for slot in (0, 2):
                pairs: list[Any] = [
                    (dice.normal(size=(20 - slot, width)) / 9, dice.normal(size=(len(part), 20 - slot)))
                    if slot or part.start else None for part in parts
                ]  # fmt: skip
                for each, table in zip(made, tables, strict=True):
                    each.put_lora(table, slot, [pair and tuple(x.astype(np.float32) for x in pair) for pair in pairs])
            for count in sizes:
                x, slots = torch.randn(count, width).to(made[0].dtype), torch.arange(count, dtype=torch.int32) % 4 - 1
                y = torch.randn(count, parts[-1].stop)
                given = [[there(each, ops.device) for each in (x, y.clone(), slots)] for ops in made]
                found, wanted = (each.add(*own).cpu() for each, own in zip(tables, given, strict=True))
                same(found, wanted, dtype, (count, parts))
                assert torch.equal(found[0], y[0])
                assert not any(torch.equal(found[row], y[row]) for row in (slots == 2).nonzero()[:, 0].tolist())


def drawing(sizes: tuple[int, ...] = (100, 1), block: int = 32) -> None:
    """Tokens are the definition's, to the bit: ties, broken lines, banned ones, cuts."""
    draw_module.BLOCK = block
    for number, size in enumerate(sizes):
        dice = random.Random(number)
        logits = torch.randn(6, size, generator=torch.Generator().manual_seed(number)) * 3
        logits[0], logits[1, 0], logits[2] = logits[0].round(), float("nan"), -float("inf")
        params = [
            SamplingParams(
                temperature=dice.choice([0.0, 0.7, 1.3]), top_k=dice.choice([0, 1, 5]),
                top_p=dice.choice([1.0, 0.9, 0.3]), min_p=dice.choice([0.0, 0.05]),
            )
            for _ in range(6)
        ]  # fmt: skip
        samplers = [
            TorchSampler(8, size, drawer=Drawer(8, size, DEVICE)), Sampler(8, size, plain=True),
        ]  # fmt: skip
        for sampler in samplers:
            for row, each in enumerate(params):
                sampler.enter(row, Fresh(array("q", [0] * (row + 1)), 1, each, (row + 1) * 0x9E3779B97F4A7C15))
        for _ in range(3):
            found = samplers[0].sample(logits.clone().to(DEVICE), [*range(6)])
            assert found == samplers[1].sample(logits.numpy().copy(), [*range(6)]), (size, params)


def real() -> None:
    """Llama 7B, 3 8B, Gemma 2, GPT-OSS, SmolLM2, DeepSeek's latents; as many rows as an engine has."""
    global BLOCKS
    BLOCKS = 128
    few, many = [(1, 1000), (1, 3)], [(1, 700), (40, 700), (3, 9)]
    kinds: list[dict[str, Any]] = [
        {"heads": (32, 32), "dim": 128}, {"heads": (32, 8), "dim": 128}, {"heads": (16, 8), "dim": 256, "cap": 50.0},
        {"heads": (64, 8), "dim": 64, "window": 128, "sunk": True}, {"heads": (9, 3), "dim": 64},
        {"heads": (16, 1), "dim": 576, "rank": 512}, {"heads": (128, 1), "dim": 576, "rank": 512},
    ]  # fmt: skip
    for dtype in NEAR:
        for kind in kinds:
            attend(dtype, sequences=few, split=512, **kind)
            attend(dtype, sequences=many, split=512, **kind)
    for packing in ("q4_1", "q8_0", "q6_k"):
        for tokens in (1, 40):
            packed(packing, "bfloat16", rows=4096, columns=4096, skip=0, tokens=tokens)
    norms((4096, 8192), (2,))
    ropes(((32, 8, 128, 128), (9, 3, 64, 64)))
    gates((11008,))
    x, slots = torch.zeros(40, 4096, dtype=torch.bfloat16), torch.zeros(40, dtype=torch.int32)
    table = GpuOps(DEVICE.type, "bfloat16").lora_table([range(4096), range(4096, 5120)], 64, 4)
    table.add(x.to(DEVICE), torch.zeros(40, 5120, device=DEVICE), slots.to(DEVICE))
    drawing((32_000, 128_256, 151_936, 201_088), block=draw_module.BLOCK)


class Pair(Solo):
    """A rank of two, of which the first does everything before the other does. told: what is on its way."""

    size = 2

    def __init__(self, rank: int, told: list[Tensor]) -> None:
        super().__init__(rank)
        self.rank, self.told = rank, told

    def broadcast(self, x: Any, source: int = 0) -> None:
        if self.rank:
            torch.as_tensor(x).copy_(self.told.pop(0))
        else:
            self.told.append(torch.as_tensor(x).clone())

    def check(self) -> None:
        pass


class Ahead:
    """Requests that come and go, each step planned before the last is committed. ahead: and begun before it is read.
    ranks: that compute it; the second gets tokens on its device. saw: of each step, what they read."""

    def __init__(self, *, ahead: bool, ranks: int = 1) -> None:
        self.ahead, size, rows = ahead, 50, 3
        self.scheduler = SchedulerConfig(
            max_num_seqs=rows, max_num_batched_tokens=8, max_model_len=64, depth=2, max_logit_rows=rows + 8
        )
        self.core = EngineCore(self.scheduler, CacheConfig(block_size=4), 24)
        self.table = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) * 3
        told, self.saw, self.recorder = list[Tensor](), [list[Any]() for _ in range(ranks)], FakeRecorder()
        self.runners = [
            self.rank(Mesh(rank, Pair(rank, told) if ranks > 1 else Solo()), rows, size) for rank in range(ranks)
        ]

    def rank(self, mesh: Mesh, rows: int, size: int) -> Runner:
        ops, tp = GpuOps("cpu", "float32", mesh.tp), mesh.tp if isinstance(mesh.tp, Pair) else None
        ops.recorder, drawer = self.recorder if mesh.samples else FakeRecorder(), ops.drawer_of(rows, size, tp)
        ops.kv_layer(1, 4, 1, 1)
        ops._shared = lambda x: x  # type: ignore[method-assign]  # as on a device

        def forward(own: Any) -> Tensor:
            self.saw[mesh.rank].append(own.step.tokens.tolist())
            at = own.step.tokens.long() * 7 + own.step.positions
            return self.table[at % size][own.step.sample_index.long()].contiguous()

        batch = Batch(8, rows, 17, rows + 8)
        sampler = TorchSampler(rows, size, drawer=drawer) if mesh.samples else Follower(rows, size, drawer)
        stage = Stage(batch, ops.compile(forward, batch), mesh)
        return Runner(batch, stage.forward, sampler, self.scheduler, 4, stage)

    def run(self, requests: list[Request]) -> tuple[dict[str, list[int]], int]:
        """Tokens of each, and how many steps began before the last was read."""
        core, found, early = self.core, {each.id: list[int]() for each in requests}, 0
        under_way: Any = None

        def commit(plan: StepPlan, parts: list[Any]) -> None:
            part, *others = (each if isinstance(each, LaneResult) else each.result() for each in parts)
            assert not any(each.rows for each in others)
            for delta in core.commit(StepResult(plan.epoch, plan.step, (part,))):
                found[delta.request_id] += delta.tokens
                assert not delta.error

        left = list(requests)
        while left or core.has_requests():
            for _ in left[:2]:
                core.admit(left.pop(0))
            plan = core.plan(0.0)
            parts = plan and [
                each.begin(plan.step, plan.lanes[0], plan.freed_rows[0], ahead=self.ahead) for each in self.runners
            ]
            early += bool(plan and under_way and all(getattr(each, "_found", each) is None for each in under_way[1]))
            if under_way is not None:
                commit(*under_way)
            under_way = plan and (plan, parts)
        return found, early


def ahead() -> None:
    """Steps that begin before the host has read the last one's tokens give the same: rows come and go, one needs its
    history on the host, one has its step recorded."""
    draw_module.BLOCK, model_graphs.OFTEN = 32, 2

    def requests() -> list[Request]:
        kinds: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 4}, {"frequency_penalty": 1.0}, {}, {}]
        kinds += [{"frequency_penalty": 1.0, "presence_penalty": -0.5}, {}]
        return [
            Request(f"r{i}", [i, 5, 9, *range(i)], SamplingParams(**kind), 1000 + i, max_tokens=3 + i)
            for i, kind in enumerate(kinds)
        ]

    made = [Ahead(ahead=each, ranks=ranks) for each, ranks in ((False, 1), (True, 1), (True, 2))]
    (wanted, none), *others = (each.run(requests()) for each in made)
    assert not none and [len(wanted[f"r{i}"]) for i in range(8)] == list(range(3, 11)), wanted
    for each, (found, early) in zip(made[1:], others, strict=True):
        assert found == wanted, (found, wanted)
        assert (early > 5) == each.ahead and each.recorder.played > 5, (early, each.recorder.played)
        assert all(saw == each.saw[0] for saw in each.saw)


CASES: dict[str, Callable[[], None]] = {
    "attention": attention_few, "attention_many": attention_many, "norms": norms, "ropes": ropes, "gates": gates,
    "packed": packed_few, "packed_many": packed_many, "model": whole_model,
    "graphs": graphs, "graphs_further": graphs_further, "graphs_many": graphs_many,
    "moved_experts": moved_experts, "adapters": adapters,
    "adapters_many": lambda: adapters((1, 16, 18, 40)), "drawing": drawing,
    "ahead": ahead, "real": real,
    "drawing_many": lambda: drawing((1, 2, 3, 31, 32, 33, 100, 500, 64, 7) * 4),
    "model_many": lambda: whole_model(tuple(NEAR), (None, "q8_0", "q4_1"), 40),
    "norms_many": lambda: norms((1, 64, 1000), (1, 20)), "gates_many": lambda: gates((1, 1000, 1025)),
    "ropes_many": lambda: ropes(((8, 2, 128, 128), (3, 3, 96, 32), (1, 1, 16, 2))),
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    named = sys.argv[1:]
    if named[0] == "cuda":
        DEVICE = torch.device(named.pop(0))
        attention._WAYS = attention._WAYS[1:]  # ours, whatever torch has
    for what in named:
        with torch.inference_mode():
            CASES[what]()
        print(what)
