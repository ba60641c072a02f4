"""Engines whose ranks share the tokens of a sequence: the same bits whatever happens to a rank, the same tokens in any
layout, more room, and what users are told of it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from planaria import LLM, SamplingParams, StructuredOutputsParams
from planaria.errors import PlanariaError
from planaria.wire import ResizeEngine
from tests.model.checkpoints import write_checkpoint, write_talker
from tests.model.engines import Engine, ask_for, texts
from tests.model.test_deepseek import SIZES
from tests.proc.asking import ask_all
from tests.proc.servers import TINY, Server, needs_smollm2, planaria, wait_until
from tests.proc.test_cli import one_line
from tests.proc.test_layouts import missing, try_now  # noqa: F401
from tests.proc.test_prefill_decode import ASKED, metric, nothing_is_left
from tests.proc.test_recovery import watched_small
from tests.tiers import representatives

TWO: dict[str, Any] = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2}
SHARES: dict[str, Any] = {"prefill_context_parallel_size": 2}
LAYOUTS = {"dcp": (TWO, "tp=2 pp=1 dcp=2"), "pcp": (SHARES, "tp=1 pp=1 pcp=2")}
FEW: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory": "8MiB", "max_num_seqs": 8, "dtype": "float32"}
PROMPTS = [prompt for prompt, _ in texts(131, [(5, 0), (90, 0), (1, 0), (33, 0), (200, 0), (64, 0)])]
Answers = list[tuple[list[int], list[float]]]


@pytest.fixture(scope="module")
def latents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = {**SIZES, "max_position_embeddings": 1024}
    return write_checkpoint(tmp_path_factory.mktemp("latents"), "deepseek_v2", **shape)


def answers(llm: LLM, which: range, on_tokens: Callable[[int, int], None] | None = None) -> Answers:
    """Tokens and their log-probabilities; every other prompt's are drawn."""
    prompts = [PROMPTS[i] for i in which]
    params = [SamplingParams(temperature=i % 2, seed=i, max_tokens=40, ignore_eos=True, logprobs=1) for i in which]
    found = []
    for output in llm.generate(prompts, params, on_tokens=on_tokens):
        (choice,) = output.outputs
        assert choice.logprobs is not None and choice.error is None
        found.append((choice.token_ids, [given.logprob for given in choice.logprobs]))
    return found


@pytest.mark.row("P19")
@pytest.mark.parametrize(
    ("model", "layout", "victim", "interleave"),
    representatives(
        product(("small", "latents"), ("dcp", "pcp"), (0, 1), (1, 16)), ("small", "dcp", 0, 1), ("small", "pcp", 1, 1)
    ),
)
def test_to_the_last_bit(request: pytest.FixtureRequest, model: str, layout: str, victim: int, interleave: int) -> None:
    """Alone, beside others, and when a rank is killed meanwhile. Its part of the KV is there for who comes after it."""
    folder, every = str(request.getfixturevalue(model)), range(len(PROMPTS))
    degrees, named = LAYOUTS[layout]
    options = {**FEW, **degrees, "dtype": "bfloat16", "cp_kv_cache_interleave_size": interleave}
    with LLM(folder, skip_tokenizer_init=True, **options) as llm:
        together = answers(llm, every)
        assert answers(llm, range(4, 5)) + answers(llm, range(1, 2)) == [together[4], together[1]]
        harmed, count = list[int](), 0

        def harm(done: int, tokens: int) -> None:
            nonlocal count
            count += tokens
            if count > 100 and not harmed:
                harmed.append(llm._loop.gang.members[victim].pid)
                os.kill(harmed[0], signal.SIGKILL)

        assert answers(llm, every, harm) == together
        gang = llm._loop.gang
        assert harmed and gang.epoch == 1 and gang.kv.kept
        assert gang.named(gang.layout) == llm.facts.layout == named


@pytest.mark.parametrize(
    ("model", "layout"),
    representatives(product(("small", "latents"), LAYOUTS), ("small", "dcp"), ("latents", "pcp")),
)
def test_fewer_ranks_and_back(
    request: pytest.FixtureRequest, missing: Path, model: str, layout: str  # noqa: F811
) -> None:  # fmt: skip
    """Who is alone has all tokens, which it gets from where they were; with the same requests going on."""
    short, (degrees, named) = "tests.proc.custom.ShortLauncher", LAYOUTS[layout]
    two = watched_small(request.getfixturevalue(model), distributed_executor_backend=short, **degrees)
    with two.llm:
        before = two.pids

        def harm() -> None:
            missing.touch()
            os.kill(before[1], signal.SIGKILL)

        one = two.run(at=20, harm=harm)
        assert one == two.expected and two.done[-1].layout == "tp=1 pp=1"
        core, loop = two.llm._loop.core, two.llm._loop
        assert core is not None and not core.replayed_tokens and loop.gang.kv.kept
        missing.unlink()
        try_now(two)
        wait_until("it has its layout again", lambda: loop.check() or len(two.pids) == 2, 120)
        assert loop.gang.kv.kept
        assert two.run() == two.expected and two.done[-1].layout == named


def test_another_layout_is_asked_for(small: Path) -> None:
    """More tensor ranks, more stages, and back, with the same requests going on and nothing computed again."""
    asked = texts(131, [(5, 30), (70, 24), (1, 40), (33, 60)])
    with Engine(str(small), **SHARES) as engine:
        expected = engine.run(asked)
        for tp, pp, named in ((2, 1, "tp=2 pp=1 pcp=2"), (1, 2, "tp=1 pp=2 pcp=2"), (1, 1, "tp=1 pp=1 pcp=2")):
            wish = ResizeEngine(named, tp, pp)
            assert engine.run(asked, 30, lambda wish=wish: ask_for(engine.loop, wish)) == expected
            assert (engine.resized[-1].layout, engine.resized[-1].error) == (named, "")
        core = engine.loop.core
        assert core is not None and not core.replayed_tokens


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_talker(tmp_path_factory.mktemp("talker"))


@pytest.mark.parametrize("layout, named", LAYOUTS.values(), ids=LAYOUTS)
def test_all_that_requests_may_want(talker: Path, layout: dict[str, Any], named: str) -> None:
    """A prefix that is there, rows that must give up their blocks, drafts, a form to follow: as with one rank."""
    head = "abc true null " * 12
    form = StructuredOutputsParams(regex="(abc|true|null){20}")
    params = [
        SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, structured_outputs=form if i == 3 else None)
        for i in range(6)
    ]
    prompts = [f"{head}{i}" for i in range(6)]
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}}

    def run(**options: Any) -> tuple[list[list[int]], Any]:
        with LLM(str(talker), **{**FEW, **drafts, **options}) as llm:
            found = []
            for _ in range(2):
                found += [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
            return found, llm.stats

    expected, _ = run()
    found, stats = run(**layout, kv_cache_memory="96KiB", max_model_len=256)
    assert found == expected
    assert stats.prefix_hits > 0 and stats.preemptions > 0 and stats.drafts.accepted and stats.kv_tokens == 384


@needs_smollm2
def test_room_for_a_third_more() -> None:
    """SmolLM2's three KV heads are two on the rank that has most of them; half of three, where tokens are shared."""

    def room(**options: Any) -> int:
        with LLM("smollm2", kv_cache_memory="64MiB", max_model_len=512, tensor_parallel_size=2, **options) as llm:
            facts = llm.facts
            assert facts.kv_bytes <= 64 << 20
            return facts.num_blocks * facts.block_size

    assert room(decode_context_parallel_size=2) / room() > 1.3


def test_half_of_the_latents(latents: Path) -> None:
    def each(**options: Any) -> float:
        with LLM(str(latents), skip_tokenizer_init=True, **{**FEW, **options}) as llm:
            return llm.facts.kv_bytes / (llm.facts.num_blocks * llm.facts.block_size)

    assert each(**TWO) == each(tensor_parallel_size=2) / 2


def test_a_prompt_that_fits_no_rank(small: Path) -> None:
    """Two ranks have the KV of it between them, each too little memory for all of it."""

    def of(memory: int, **options: Any) -> Any:
        return LLM(str(small), skip_tokenizer_init=True, **{**FEW, "kv_cache_memory": memory, **options})

    prompt, params = [(7 + 17 * j * j) % 131 for j in range(400)], SamplingParams(temperature=0, max_tokens=8)
    with of(8 << 20) as llm:
        (expected,) = llm.generate([prompt], params)
        each = llm.facts.kv_bytes // (llm.facts.num_blocks * llm.facts.block_size)
    with pytest.raises(PlanariaError, match="max-model-len"):
        of(300 * each).close()
    with of(300 * each, **SHARES) as llm:
        assert llm.facts.kv_bytes <= 300 * each
        (found,) = llm.generate([prompt], params)
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.mark.row("P1", "P20")
def test_what_users_are_told(small: Path) -> None:
    asked = ["generate", str(small), *TINY, "--prompt-token-ids", "1,2,3", "--max-tokens", "2", "--json"]
    result = planaria(*asked, "-tp", "2", "-pcp", "2", "-dcp", "2", "--dcp-kv-cache-interleave-size", "4")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["layout"] == "tp=2 pp=1 pcp=2 dcp=2"
    assert "--dcp-kv-cache-interleave-size is the old name of --cp-kv-cache-interleave-size" in result.stderr
    for wrong, says in (
        (["-tp", "2", "-dcp", "2", "--cp-kv-cache-interleave-size", "5"], ("-size 5", "16", "context parallel")),
        (["-tp", "3", "-dcp", "2"], ("-size 2", "--tensor-parallel-size 3", "context parallel")),
    ):
        result = planaria(*asked, *wrong)
        assert result.returncode == 2
        assert all(part in one_line(result.stderr) for part in says)


@pytest.mark.parametrize("degrees", [["-pcp", "2"], pytest.param(["-tp", "2", "-dcp", "2"], marks=pytest.mark.long)])
def test_prompts_go_on_in_engines_of_the_other_kind(small: Path, degrees: list[str]) -> None:
    """Each rank reads its own tokens of what the other engine lends."""
    with LLM(str(small), skip_tokenizer_init=True, **{**FEW, "max_model_len": 1024}) as llm:
        params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in ASKED]
        expected = [output.outputs[0].token_ids for output in llm.generate([prompt for prompt, _ in ASKED], params)]
    kinds = ["--prefill-engines", "1", "--decode-engines", "1", *degrees]
    with Server(str(small), *TINY, *kinds, "--max-num-seqs", "32", "--max-num-batched-tokens", "64") as server:
        assert ask_all(server.url, str(small), ASKED[6:7]) == expected[6:7]
        # all whole blocks, of tokens of two ranks: nothing has been measured that says otherwise yet
        assert metric(server, "planaria:kv_transfer_blocks_total") == len(ASKED[6][0]) // (2 * 16)
        assert ask_all(server.url, str(small), ASKED) == expected
        assert metric(server, "planaria:kv_transfer_failed_total") == 0
        nothing_is_left(server)
