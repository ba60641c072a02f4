"""Micro-batches: what they compute is what the whole step would, one computes while another exchanges, and an error in
one ends them all. Ranks are threads here."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.micro_batch_trace import COMPUTE, traced
from planaria.config.experts import expert_map
from planaria.config.options import ParallelConfig
from planaria.kernels.cpu.layout import ROWS_TOKENS
from planaria.kernels.cpu.ops import CpuOps
from planaria.kernels.cpu.recorder import Recorder
from planaria.kernels.ops import Batch
from planaria.kernels.reference import TorchOps
from planaria.kernels.share import BatchShare
from planaria.layers.build import build
from planaria.mesh.all2all import Shapes, make
from planaria.mesh.comm import Array, CollectiveAborted, Comm, Solo
from planaria.mesh.mesh import Mesh
from planaria.models import model_config
from planaria.models.deal import deal
from planaria.worker.micro_batches import MicroBatches, blank, cut, cut_share
from planaria.worker.streams import Streams
from planaria.worker.turns import Rotation, TurnsOver
from tests.model.checkpoints import DictSource, config_of, write_checkpoint
from tests.model.driver import Driver
from tests.model.test_mesh import SOON, Group

MODEL = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16,
    "v_head_dim": 16, "first_k_dense_replace": 1, "num_hidden_layers": 3, "n_routed_experts": 8, "n_shared_experts": 2,
    "num_experts_per_tok": 3, "moe_intermediate_size": 64,
}  # fmt: skip
THRESHOLD = 2  # tokens of a lane


def tokens(count: int, seed: int) -> list[int]:
    return [(7 + 31 * seed + 17 * j * j) % 131 for j in range(count)]


# What lanes are fed, step by step: sequences that are cut, a lane with nothing, one that is below, all below, decoding.
FED: list[list[dict[int, int]]] = [
    [{0: 37, 1: 5}, {0: 20}],
    [{0: 1, 1: 1, 2: 41}, {}],
    [{0: 1, 1: 1}, {0: 1}],
    [{0: 1, 1: 1, 2: 1, 3: 1}, {0: 1, 1: 1}],
    [{}, {}],
    [{1: 3}, {0: 1, 1: 6, 2: 9}],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        family: write_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
        for family, overrides in (("qwen2_moe", MODEL), ("deepseek_v2", LATENT))
    }


class Rank:
    """A lane's rank with its part of the model, stepped by hand; `exchanges`: one for each micro-batch. sliced: it has
    a slice of every expert, not some of them."""

    def __init__(
        self, folder: Path, kernels: str, name: str, groups: Sequence[Comm], tp: Comm, *, sliced: bool = False
    ) -> None:
        config, width = model_config(config_of(folder)), tp.size
        rank, size = groups[0].rank, groups[0].size
        self.ops: Any = CpuOps("float32", 1, tp=tp) if kernels == "native" else TorchOps("cpu", tp=tp)
        parallel = msgspec.structs.replace(ParallelConfig(), enable_expert_parallel=not sliced)
        experts, slices = expert_map(config, parallel, size), size // width if sliced else 1
        shards = deal(config, width, 1, None, experts, rank // width, slices=slices)
        model = build(config, DictSource.open(folder), self.ops, quantization="none", shard=shards[rank % width])
        assert config.moe is not None
        shapes = Shapes(
            max_tokens=512, width=width, num_slots=config.moe.num_experts, top_k=config.moe.top_k,
            hidden_size=config.hidden_size,
        )  # fmt: skip
        self.exchanges = [make(name, group, shapes, dealt=width > 1) for group in groups]
        self.ops.join(tp, self.exchanges[0])
        self.driver = Driver(model, self.ops, block_size=16, num_blocks=64)
        self.forward, self.mesh = model.forward, Mesh(rank, tp, ep=groups[0], further=tuple(groups[1:]))
        self.parts: MicroBatches | None = None

    def split(self) -> MicroBatches:
        """From now on."""
        self.parts = MicroBatches(
            self.ops, self.forward, self.driver.batch, self.mesh, self.exchanges,
            lambda tokens, prefill: tokens > THRESHOLD, lambda: torch.set_num_threads(1),
        )  # fmt: skip
        self.driver.run = self.parts
        return self.parts

    def steps(self, lane: int) -> list[torch.Tensor]:
        """Logits of all that the lane is fed, step by step."""
        found = []
        for number, fed in enumerate(FED):
            out = self.driver.step({s: tokens(n, 10 * number + s + 5 * lane) for s, n in fed[lane].items()})
            found.append(torch.cat(list(out.values())))
        return found

    def close(self) -> None:
        if self.parts is not None:
            self.parts.close()
        self.ops.close()


class Lanes:
    """Two lanes of `width` ranks, each rank in a thread."""

    def __init__(self, kind: str, width: int, channels: int) -> None:
        self.width = width
        self.spread = [Group(kind, 2 * width) for _ in range(channels)]
        self.tensor = [Group(kind, width) for _ in range(2)] if width > 1 else []

    def tp(self, rank: int) -> Comm:
        lane, place = divmod(rank, self.width)
        return self.tensor[lane].comms[place] if self.tensor else Solo()

    def run(self, work: Any) -> list[Any]:
        """`work(groups of the rank, one for each micro-batch; its tensor ranks)`."""
        torch.set_num_threads(1)
        return self.spread[0].run(
            lambda comm: work([group.comms[comm.rank] for group in self.spread], self.tp(comm.rank))
        )

    def close(self) -> None:
        for group in (*self.spread, *self.tensor):
            group.close()


@pytest.fixture
def lanes(request: pytest.FixtureRequest) -> Iterator[Lanes]:
    made = Lanes(*request.param)
    yield made
    made.close()


CASES: list[tuple[tuple[str, int, int], str, str, str]] = [
    (("shared", 1, 2), "native", "allgather_reducescatter", "qwen2_moe"),
    (("shared", 1, 2), "native", "allgather_reducescatter", "slices of qwen2_moe"),
    (("shared", 2, 3), "native", "allgather_reducescatter", "qwen2_moe"),
    (("gloo", 1, 2), "torch", "naive", "qwen2_moe"),
    (("shared", 1, 2), "native", "naive", "deepseek_v2"),
    (("gloo", 2, 2), "torch", "allgather_reducescatter", "deepseek_v2"),
    (("shared", 2, 2), "torch", "naive", "qwen2_moe"),
    (("gloo", 2, 2), "native", "naive", "qwen2_moe"),
]


@pytest.mark.parametrize(("lanes", "kernels", "name", "family"), CASES, indirect=["lanes"], ids=str)
def test_logits_are_those_of_the_whole_step(
    lanes: Lanes, folders: dict[str, Path], kernels: str, name: str, family: str
) -> None:
    """On the native kernels bit for bit, whatever is cut; all ranks of all lanes split the same steps."""

    def work(groups: Sequence[Comm], tp: Comm) -> list[list[int]]:
        lane = groups[0].rank // tp.size
        sliced, folder = family.startswith("slices of "), folders[family.removeprefix("slices of ")]
        whole, split = (Rank(folder, kernels, name, groups, tp, sliced=sliced) for _ in range(2))
        expected, parts = whole.steps(lane), split.split()
        how: list[list[int]] = []
        spans = traced(parts)
        for number in range(len(FED)):
            spans.clear()
            split_step = split.driver.step(
                {s: tokens(n, 10 * number + s + 5 * lane) for s, n in FED[number][lane].items()}
            )
            found = torch.cat(list(split_step.values()))
            how.append([span.place for span in spans if span.what == COMPUTE])
            if tp.rank == 0 and kernels == "native" and name != "naive":
                assert torch.equal(found, expected[number]), f"step {number}"
            elif tp.rank == 0:
                torch.testing.assert_close(found, expected[number], rtol=1e-4, atol=1e-4)
        for rank in (whole, split):
            rank.close()
        return how

    found = lanes.run(work)
    count = len(lanes.spread)
    assert all(how == found[0] for how in found)
    for number, places in enumerate(found[0]):
        if any(sum(fed.values()) > THRESHOLD for fed in FED[number]):
            assert places == [*range(count)] * (len(places) // count) and len(places) > count  # strictly in turn
        else:
            assert set(places) == {0}
    assert not [t for t in threading.enumerate() if t.name.startswith("planaria-micro-batch")]


class Gated:
    """An exchange that waits: the first micro-batch's first dispatch until the second one has computed."""

    name, lanes = "gated", 1

    def __init__(self, computed: threading.Event, *, error: Exception | None = None) -> None:
        self.computed, self.error = computed, error

    def begin(self, num_tokens: int) -> int:
        return num_tokens

    def tell(self, number: int) -> list[int]:
        return [number]

    def count(self, counts: Sequence[int]) -> int:
        return sum(counts)

    def dispatch(self, parts: Sequence[Array], into: Sequence[Array]) -> None:
        assert self.computed.wait(SOON), "nobody computed meanwhile"
        if self.error is not None:
            raise self.error
        for part, whole in zip(parts, into, strict=True):
            whole[...] = part

    def combine(self, y: Array, out: Array) -> None:
        out[...] = y


def one_lane(
    folder: Path, exchanges: list[Gated], mesh: Mesh, *, queues: bool = False
) -> tuple[Driver, MicroBatches]:  # fmt: skip
    ops = TorchOps("cpu")
    model = build(model_config(config_of(folder)), DictSource.open(folder), ops, quantization="none")
    ops.join(Solo(), exchanges[0])
    driver = Driver(model, ops, block_size=16, num_blocks=16)
    parts = MicroBatches(
        ops,
        model.forward,
        driver.batch,
        mesh,
        exchanges,
        lambda tokens, prefill: True,
        lambda: None,
        Streams(len(exchanges)) if queues else None,
    )
    driver.run = parts
    return driver, parts


def test_one_computes_while_another_exchanges(folders: dict[str, Path]) -> None:
    """The first micro-batch's exchange ends only after the second has computed and exchanges as well."""
    computed, always = threading.Event(), threading.Event()
    always.set()
    second = Gated(always)
    second.count = lambda counts: (computed.set(), sum(counts))[1]  # type: ignore[func-returns-value, method-assign]
    driver, parts = one_lane(folders["qwen2_moe"], [Gated(computed), second], Mesh())
    alone, whole = one_lane(folders["qwen2_moe"], [Gated(always), Gated(always)], Mesh())
    whole.splits = lambda tokens, prefill: False
    spans = traced(parts)
    fed = {0: tokens(9, 1), 1: tokens(6, 2)}
    found, expected = driver.step(fed), alone.step(fed)
    for sequence in fed:
        torch.testing.assert_close(found[sequence], expected[sequence], rtol=1e-4, atol=1e-4)
    first = next(span for span in spans if (span.place, span.what) == (0, "dispatch"))
    other = next(span for span in spans if (span.place, span.what) == (1, COMPUTE))
    assert first.begin <= other.begin < first.end
    parts.close()
    whole.close()


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize(
    "error", [CollectiveAborted((1,), "rank 1 is gone"), ValueError("broken")], ids=["peer", "other"]
)
def test_an_error_in_one_ends_all_and_is_the_step_s(folders: dict[str, Path], place: int, error: Exception) -> None:
    """The other waits in its exchange, which `abort` ends as a group's does."""
    always, aborted = threading.Event(), threading.Event()
    always.set()
    exchanges = [Gated(aborted, error=CollectiveAborted((), "the group was fenced")) for _ in range(2)]
    exchanges[place] = Gated(always, error=error)
    mesh = Mesh(0, Fenced(aborted))
    driver, parts = one_lane(folders["qwen2_moe"], exchanges, mesh)
    with pytest.raises(type(error), match=str(error)):
        driver.step({0: tokens(9, 1)})
    assert aborted.is_set()
    parts.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("planaria-micro-batch")]


def test_a_thread_that_can_not_begin_ends_the_step(folders: dict[str, Path]) -> None:
    """Else the first micro-batch would wait for a turn that nobody hands on."""
    always, aborted = threading.Event(), threading.Event()
    always.set()
    driver, parts = one_lane(folders["qwen2_moe"], [Gated(always), Gated(always)], Mesh(0, Fenced(aborted)))

    def enter() -> None:
        raise RuntimeError("no device")

    parts._threads = ThreadPoolExecutor(1, "planaria-micro-batch", enter)
    with ThreadPoolExecutor(1) as other, pytest.raises(BrokenExecutor):
        other.submit(driver.step, {0: tokens(9, 1)}).result(SOON)
    assert aborted.is_set()
    parts.close()


class Device:
    """Stands in for torch.cuda's streams: `done` says what was queued on which, by its name."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, str]] = []
        self.local = threading.local()
        self.made = 0

    def current(self) -> Queue:
        return getattr(self.local, "queue", None) or Queue(self, "step")

    def another(self) -> Queue:
        self.made += 1
        return Queue(self, f"stream {self.made - 1}")

    @contextlib.contextmanager
    def using(self, queue: Queue) -> Iterator[None]:
        self.local.queue = queue
        yield
        self.local.queue = None


class Queue:
    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name

    def record_event(self) -> str:
        event = f"{self.name} at {len(self.device.done)}"
        self.device.done.append((self.name, "records", event))
        return event

    def wait_event(self, event: str) -> None:
        self.device.done.append((self.name, "waits for", event))

    def wait_stream(self, other: Queue) -> None:
        self.device.done.append((self.name, "waits for", other.name))


def test_on_a_device_turns_follow_one_another_and_exchanges_keep_only_their_own_waiting(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    device, always = Device(), threading.Event()
    always.set()
    for name, instead in (
        ("Stream", device.another), ("current_stream", device.current), ("stream", device.using)
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, instead)
    driver, parts = one_lane(folders["qwen2_moe"], [Gated(always), Gated(always)], Mesh(), queues=True)
    driver.step({0: tokens(9, 1)})
    parts.close()
    ends = [event for _, how, event in device.done if how == "records"]
    begins = [(name, event) for name, how, event in device.done if how == "waits for" and " at " in event]
    assert len(begins) == 2 * (2 * 2 + 1)  # two micro-batches, two exchanges in each of two layers
    assert [event for _, event in begins] == ends[:-1], "a turn waits for the one before, the first for the step's"
    assert [name for name, _ in begins] == ["stream 0", "stream 1"] * 5
    assert [event.partition(" at ")[0] for event in ends] == ["step"] + ["stream 0", "stream 1"] * 5
    assert device.done[-2:] == [("step", "waits for", "stream 0"), ("step", "waits for", "stream 1")]


class Fenced(Solo):
    def __init__(self, aborted: threading.Event) -> None:
        super().__init__()
        self.aborted = aborted

    def abort(self, reason: str) -> None:
        self.aborted.set()


def test_a_turn_that_will_not_come() -> None:
    turns = Rotation(3)
    turns.begin()
    turns.take(0)
    turns.hand_on(0)
    turns.take(1)
    assert turns.fail(ValueError("first")) and not turns.fail(ValueError("second"))
    for place in (0, 2):
        with pytest.raises(TurnsOver):
            turns.take(place)
    assert str(turns.error) == "first"
    turns.begin()  # another step
    turns.take(0)


Sequences = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30), st.booleans()), max_size=12)


def test_each_exchanges_with_its_context_ranks_in_places_of_its_own() -> None:
    """Which all ranks find, and another recording of the same micro-batch."""
    group = Group("shared", 2)

    def work(comm: Comm) -> list[int]:
        ops, whole = CpuOps("float32", 1, tp=comm), Batch(64, 4, 8, 64)
        batches, seen = [whole, whole, blank(whole, 2, 0), blank(whole, 2, 1)], []
        for number, batch in enumerate(batches):
            recorder = Recorder(batch, ops.target, comm, None, 1, lambda kind: None, comm)  # type: ignore[arg-type, return-value]
            for name, size in (("columns", 256), ("parts", 512)):
                memory, ld = recorder.region(name, ROWS_TOKENS, size)
                assert ld == size
                memory[: batch.max_tokens * ld] = 16 * number + 2 * (name == "parts") + comm.rank
                comm.meet()  # type: ignore[attr-defined]
        for batch in batches:
            recorder = Recorder(batch, ops.target, comm, None, 1, lambda kind: None, comm)  # type: ignore[arg-type, return-value]
            seen += [
                int(found)
                for name, size in (("columns", 256), ("parts", 512))
                for found in np.unique(recorder.region(name, ROWS_TOKENS, size)[0][: batch.max_tokens * size] // 2)
            ]
        ops.close()
        return seen

    assert group.run(work) == [[8, 9, 8, 9, 16, 17, 24, 25]] * 2
    group.close()


@given(Sequences, st.integers(1, 5), st.integers(2, 3))
def test_parts_of_shares_are_the_step(sequences: list[tuple[int, int, bool]], count: int, size: int) -> None:
    """Each is the next tokens of the step, dealt to the shares in order, and as many of each as everybody can reckon; a
    share has as many as without parts, with what the stage before made of them."""
    step, drawn = Batch(400, 12, 8, 400), filled_with(sequences)
    fill(step, sequences)
    wholes = [BatchShare(step, rank, size) for rank in range(size)]
    sizes = [whole.deal() for whole in wholes]
    for rank, whole in enumerate(wholes):
        whole.make_hidden(16)[:, 0] = 1000 * rank + np.arange(whole.max_tokens)
    found, samples = list[int](), list[int]()
    hidden = [list[float]() for _ in range(size)]
    for place in range(count):

        def bounds(tokens: int, place: int = place) -> tuple[int, int]:
            return tokens * place // count, tokens * (place + 1) // count

        first = len(found)
        for rank, whole in enumerate(wholes):
            part = blank(whole, count, place)
            assert isinstance(part, BatchShare) and part.place == place + 1
            cut_share(part, whole, bounds)
            own, (begin, end) = int(part.counts[0]), bounds(sizes[rank])
            assert own == end - begin <= part.max_tokens and part.counts[4] == part.step.counts[0]
            assert part.counts[6] == len(found) - first
            found += part.tokens[:own].tolist()
            assert part.hidden is not None
            hidden[rank] += part.hidden[:own, 0].tolist()
            if rank == 0:
                samples += [at + first for at in part.sample_index[: part.counts[2]].tolist()]
    assert found == step.tokens[: step.counts[0]].tolist() and samples == drawn
    assert hidden == [[1000 * rank + i for i in range(own)] for rank, own in enumerate(sizes)]


def filled_with(sequences: list[tuple[int, int, bool]]) -> list[int]:
    """Tokens that are drawn after."""
    ends = np.cumsum([size for _, size, _ in sequences])
    return [int(end) - 1 for end, (_, _, samples) in zip(ends, sequences, strict=True) if samples]


def fill(whole: Batch, sequences: list[tuple[int, int, bool]]) -> None:
    """With a step. Sequences: tokens that are there, new ones, is one drawn after them?"""
    at = 0
    for i, (start, size, _) in enumerate(sequences):
        whole.tokens[at : at + size] = np.arange(size) + 100 * i
        whole.positions[at : at + size] = np.arange(start, start + size)
        whole.slots[at : at + size] = np.arange(size) + 1000 * i
        whole.seq_start[i : i + 2] = at, at + size
        whole.seq_len[i], whole.seq_row[i] = start + size, 11 - i
        at += size
    drawn = filled_with(sequences)
    whole.sample_index[: len(drawn)] = drawn
    whole.counts[:3] = at, len(sequences), len(drawn)


@given(Sequences, st.integers(1, 5))
def test_parts_are_the_step(sequences: list[tuple[int, int, bool]], count: int) -> None:
    """Every token is in one part, at its position, after what its sequence has computed; drawn where it was drawn."""
    whole, drawn = Batch(400, 12, 8, 400), filled_with(sequences)
    fill(whole, sequences)
    at = int(whole.counts[0])
    whole.make_hidden(16)[:, 0] = np.arange(400)
    seen: dict[int, int] = {}
    found_tokens, found_drawn, first = [], [], 0
    for place in range(count):
        part = Batch(400, 12, 8, 400)
        last = at * (place + 1) // count
        cut(part, whole, first, last)
        size, rows, samples = (int(n) for n in part.counts[:3])
        found_tokens += part.tokens[:size].tolist()
        found_drawn += (part.sample_index[:samples] + first).tolist()
        assert size == last - first and part.seq_start[0] == 0 and (rows == 0 or part.seq_start[rows] == size)
        assert part.hidden is not None and part.hidden[:size, 0].tolist() == list(range(first, last))
        for i in range(rows):
            begin, end = part.seq_start[i : i + 2].tolist()
            row, ends = int(part.seq_row[i]), int(part.seq_len[i])
            assert begin < end and part.positions[begin:end].tolist() == list(range(ends - end + begin, ends))
            assert (part.slots[begin:end] // 1000 == 11 - row).all()
            assert seen.get(row, sequences[11 - row][0]) == ends - (end - begin)
            seen[row] = ends
        first = last
    assert found_tokens == whole.tokens[:at].tolist() and found_drawn == drawn
    assert seen == {11 - i: start + size for i, (start, size, _) in enumerate(sequences)}
