"""`LLM` and `AsyncLLM` on a small random checkpoint: what their users rely on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from planaria import LLM, AsyncLLM, SamplingParams
from planaria.errors import CapacityError, ConfigError, EngineDead, ModelError, RequestError, UserError
from planaria.executor.loop import EngineLoop
from planaria.llm import make_options
from planaria.server.inputs import submissions
from tests.model import checkpoints

OPTIONS = {"max_model_len": 128, "kv_cache_memory": "8MiB", "skip_tokenizer_init": True, "threads": 1}
IDS = [5, 9, 2, 7, 11]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:  # type: ignore[no-untyped-def]
    """A tiny Llama in Hugging Face layout."""
    return str(checkpoints.write_checkpoint(tmp_path_factory.mktemp("llama"), "llama"))


@pytest.fixture(scope="module")
def llm(folder: str):  # type: ignore[no-untyped-def]
    with LLM(folder, **OPTIONS) as llm:
        yield llm


def ids(llm: LLM, prompt: list[int], **params: object) -> list[list[int]]:
    (output,) = llm.generate([prompt], SamplingParams(ignore_eos=True, **params))  # type: ignore[arg-type]
    return [choice.token_ids for choice in output.outputs]


def test_one_prompt_many_prompts(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    (one,) = llm.generate(IDS, params)
    many = llm.generate([IDS, IDS[:2], IDS], params)
    assert [o.outputs[0].token_ids for o in many][::2] == [one.outputs[0].token_ids] * 2
    assert one.prompt_token_ids == IDS and one.prompt is None


def test_seeds_and_choices(llm: LLM) -> None:
    first = ids(llm, IDS, n=4, seed=3, max_tokens=10)
    assert first == ids(llm, IDS, n=4, seed=3, max_tokens=10)
    assert len({tuple(choice) for choice in first}) == 4
    assert first[0] == ids(llm, IDS, seed=3, max_tokens=10)[0]
    assert first != ids(llm, IDS, n=4, seed=4, max_tokens=10)


@pytest.mark.row("P26")
def test_a_batch_that_was_broken_off_goes_on_from_its_journal(folder: str, tmp_path: Path) -> None:
    """Greedy, and sampled with seeds that nobody gave; what is noted is not computed again, a torn line is."""
    journal, prompts = tmp_path / "journal", [IDS, IDS[:2], IDS[:3]]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True), SamplingParams(max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1, n=2, max_tokens=30, ignore_eos=True, logprobs=1),
    ]  # fmt: skip
    counted: list[int] = []

    def break_off(done: int, tokens: int) -> None:
        counted.append(tokens)
        if sum(counted) > 40:
            raise KeyboardInterrupt

    with LLM(folder, **OPTIONS) as llm, pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, params, on_tokens=break_off, journal=journal)
    before = sum(counted)
    journal.write_bytes(journal.read_bytes()[:-3])
    with LLM(folder, **OPTIONS) as llm:
        counted.clear()
        outputs = llm.generate(prompts, params, on_tokens=lambda done, tokens: counted.append(tokens), journal=journal)
        assert 93 - before < sum(counted) < 93 - before + 5, "only what the torn line said is computed again"
        assert [len(choice.token_ids) for output in outputs for choice in output.outputs] == [30, 3, 30, 30]
        assert outputs[0].outputs[0].token_ids == ids(llm, IDS, temperature=0, max_tokens=30)[0]
        counted.clear()
        again = llm.generate(prompts, params, on_tokens=lambda done, tokens: counted.append(tokens), journal=journal)
        assert not sum(counted)
        said = [[(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs] for output in outputs]
        assert said == [
            [(c.text, c.token_ids, c.logprobs, c.finish_reason) for c in output.outputs] for output in again
        ]
        with pytest.raises(ConfigError, match=r"journal .*is of other prompts"):
            llm.generate(prompts[:2], params[:2], journal=journal)
        seeds = msgspec.json.decode(journal.read_bytes().splitlines()[0])["seeds"]
        (drawn,) = llm.generate([IDS[:3]], SamplingParams(temperature=1, max_tokens=30, ignore_eos=True, seed=seeds[2]))
        assert drawn.outputs[0].token_ids == outputs[2].outputs[0].token_ids, "a continuation is as if nothing had been"


def test_engine_seed(folder: str) -> None:
    """With a seed, requests that bring none are reproducible, and differ from each other."""
    runs = []
    for _ in range(2):
        with LLM(folder, seed=7, **OPTIONS) as llm:
            outputs = llm.generate([IDS, IDS], SamplingParams(max_tokens=10, ignore_eos=True))
            runs.append([o.outputs[0].token_ids for o in outputs])
    assert runs[0] == runs[1] and runs[0][0] != runs[0][1]


def test_stop_token_and_lengths(llm: LLM) -> None:
    (free,) = ids(llm, IDS, temperature=0, max_tokens=20)
    (output,) = llm.generate([IDS], SamplingParams(temperature=0, max_tokens=20, stop_token_ids=(free[4],)))
    (choice,) = output.outputs
    assert choice.finish_reason == "stop" and choice.token_ids == free[: free.index(free[4]) + 1]
    assert choice.stop_reason == free[4]
    (whole,) = ids(llm, IDS, temperature=0, max_tokens=None)
    assert len(whole) == 128 - len(IDS)


@pytest.mark.parametrize(
    "prompt, params, names",
    [
        ([], {}, "prompt"),
        ([10**6], {}, "token id"),
        ([-1], {}, "token id"),
        ([1] * 200, {}, "128"),
        ([1], {"max_tokens": 500}, "max_tokens"),
        ([1], {"temperature": float("nan")}, "temperature"),
        ([1], {"n": 10**9}, "n must be"),
        ([1], {"stop": ("x",)}, "tokenizer"),
        ([1], {"logit_bias": {10**7: 1.0}}, "logit_bias"),
    ],
)
def test_bad_requests_cost_nothing(llm: LLM, prompt: list[int], params: dict[str, object], names: str) -> None:
    with pytest.raises(RequestError, match=names):
        llm.generate([IDS, prompt], SamplingParams(**params))  # type: ignore[arg-type]
    assert len(ids(llm, IDS, max_tokens=3)[0]) == 3


def test_refused_at_the_door(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_tokenz"):
        LLM(folder, max_tokenz=3)
    with pytest.raises(CapacityError, match="--max-model-len"):
        LLM(folder, **{**OPTIONS, "kv_cache_memory": 100})
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    config = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(config.replace("LlamaForCausalLM", "BloomForCausalLM"))
    with pytest.raises(ModelError, match=r"BloomForCausalLM.*LlamaForCausalLM"):
        LLM(str(tmp_path), model_impl="planaria")  # else Transformers is asked, too


def test_quantised_at_load(folder: str) -> None:
    for kind in ("q8_0", "q4_1"):
        with LLM(folder, quantization=kind, dtype="bfloat16", **OPTIONS) as llm:
            assert llm.facts.quantization == kind and len(ids(llm, IDS, max_tokens=4)[0]) == 4


def test_close_leaves_no_thread(folder: str) -> None:
    before = set(threading.enumerate())
    llm = LLM(folder, **{**OPTIONS, "threads": 3}, async_scheduling=True)
    ids(llm, IDS, max_tokens=2)
    assert set(threading.enumerate()) - before
    llm.close()
    llm.close()
    gc.collect()
    assert not {t for t in set(threading.enumerate()) - before if t.is_alive()}


@pytest.mark.parametrize("place", ["plan", "commit"])
def test_an_interrupt_in_the_midst_of_a_step_is_one_after_it(
    llm: LLM, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A notebook's user goes on with the same LLM."""
    found = signal.signal(signal.SIGINT, signal.default_int_handler)  # these tests may run where nobody hears it
    before = ids(llm, IDS, temperature=0, max_tokens=12)
    core = llm._loop.core
    assert core is not None
    done = getattr(core, place)

    def interrupted(*given: object) -> object:
        os.kill(os.getpid(), signal.SIGINT)
        return done(*given)

    with monkeypatch.context() as patch:
        patch.setattr(core, place, interrupted)
        with pytest.raises(KeyboardInterrupt):
            ids(llm, IDS, temperature=0, max_tokens=12)
    assert signal.signal(signal.SIGINT, found) is signal.default_int_handler
    assert ids(llm, IDS, temperature=0, max_tokens=12) == before


def test_threads_that_call_it_take_turns(llm: LLM) -> None:
    prompts = [[number, *IDS] for number in range(3, 9)]
    alone = [ids(llm, prompt, temperature=0, max_tokens=20) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: ids(llm, prompt, temperature=0, max_tokens=20), prompts)) == alone


def test_what_changes_or_asks_the_engine_takes_turns_with_what_runs(llm: LLM) -> None:
    """Two threads in one engine ended in ranks that were awaited for ever."""
    refused: list[BaseException | None] = []

    def meanwhile(done: int, tokens: int) -> None:
        if not refused:
            with ThreadPoolExecutor(1) as pool:
                refused.append(pool.submit(llm.collective_rpc, "resident", timeout=0.01).exception())
            with pytest.raises(UserError, match="still run"):
                llm.sleep()

    llm.generate([IDS], SamplingParams(max_tokens=4, ignore_eos=True), on_tokens=meanwhile)
    assert isinstance(refused[0], TimeoutError) and "another thread" in str(refused[0])
    assert len(llm.collective_rpc("resident", timeout=60)) == 1


def test_closing_ends_what_another_thread_waits_for(folder: str) -> None:
    """As at the end of a program whose daemon thread computes: that one's exit waited for ever."""
    llm, closing = LLM(folder, **OPTIONS), []

    def close(done: int, tokens: int) -> None:
        if not closing:
            closing.append(threading.Thread(target=llm.close))
            closing[0].start()
            assert llm._closed.wait(60)

    with pytest.raises(EngineDead, match="was closed"):
        llm.generate([IDS], SamplingParams(max_tokens=100, ignore_eos=True), on_tokens=close)
    closing[0].join(60)
    assert not closing[0].is_alive()
    for late in (llm.sleep, lambda: llm.generate([IDS])):
        with pytest.raises(EngineDead, match="was closed"):
            late()


def test_a_fork_neither_has_nor_ends_its_parents_engine(folder: str) -> None:
    with LLM(folder, tensor_parallel_size=2, **OPTIONS) as llm:
        before = ids(llm, IDS, temperature=0, max_tokens=5)
        if not (pid := os.fork()):
            code = 1
            with contextlib.suppress(BaseException):
                try:
                    ids(llm, IDS, temperature=0, max_tokens=5)
                except UserError as e:
                    llm.close()
                    code = int("was forked after its LLM" not in str(e))
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert ids(llm, IDS, temperature=0, max_tokens=5) == before and llm.stats.epoch == 0


def test_two_steps_in_flight_change_nothing(folder: str, llm: LLM) -> None:
    prompts = [[(i * 7 + j) % 50 for j in range(3 + i)] for i in range(12)]
    params = SamplingParams(temperature=0.9, seed=1, max_tokens=15, ignore_eos=True)
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    with LLM(folder, async_scheduling=True, max_num_seqs=5, max_num_batched_tokens=9, **OPTIONS) as ahead:
        assert [o.outputs[0].token_ids for o in ahead.generate(prompts, params)] == expected


def test_async_streams(folder: str, llm: LLM) -> None:
    """Many streams at once; a piece per step; leaving one early cancels it and frees its blocks."""
    (expected,) = ids(llm, IDS, temperature=0, max_tokens=12)
    engine = AsyncLLM(folder, **OPTIONS)

    async def stream(count: int) -> list[int]:
        tokens: list[int] = []
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        async for piece in engine.generate(IDS, params):
            tokens += piece.token_ids
            if len(tokens) >= count:
                break
        return tokens

    async def main() -> None:
        results = await asyncio.gather(*(stream(12 if i % 2 else 4) for i in range(16)))
        for i, tokens in enumerate(results):
            assert tokens == expected[: 12 if i % 2 else 4]
        with pytest.raises(RequestError):
            await anext(aiter(engine.generate([])))

    asyncio.run(main())
    engine.close()
    assert not engine._engine.alive and not engine.is_failed


@pytest.mark.row("X10")
def test_an_engine_that_ends_answers_its_streams(folder: str) -> None:
    """Closed, or failed in its thread, with streams open: each ends with an error, and the next is refused."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)

    async def last_error(engine: AsyncLLM, end: Callable[[], object]) -> str | None:
        async def read() -> str | None:
            return [piece.error async for piece in engine.generate(IDS, params)][-1]

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)  # it has asked, and waits for its first piece
        end()
        return await reading

    async def main(engine: AsyncLLM, end: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            assert await last_error(engine, end)
            with pytest.raises(EngineDead):
                await anext(aiter(engine.generate(IDS, params)))

    told: list[str] = []
    engine = AsyncLLM(folder, **OPTIONS)
    engine.register_failure_callback(lambda failure: told.append(str(failure)))
    asyncio.run(main(engine, engine.close))
    assert not told and not engine.is_failed

    broken = AsyncLLM(folder, **OPTIONS)
    broken.register_failure_callback(lambda failure: 1 // 0)
    broken.register_failure_callback(lambda failure: told.append(str(failure)))

    def fail() -> bool:
        raise ZeroDivisionError("on purpose")

    asyncio.run(main(broken, lambda: setattr(broken._loop, "step", fail)))
    assert broken.is_failed and len(told) == 1 and "on purpose" in told[0]
    broken.register_failure_callback(lambda failure: told.append(str(failure)))
    assert told[1:] == told[:1], "who comes late is told at once"
    broken.close()


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
@pytest.mark.row("X11")
def test_an_engine_that_nobody_has_any_more_ends(folder: str, kind: type[LLM | AsyncLLM]) -> None:
    llm = kind(folder, **OPTIONS)
    gone, loop = weakref.ref(llm), llm._loop
    thread = llm._engine._thread if isinstance(llm, AsyncLLM) else None
    del llm
    gc.collect()
    assert gone() is None
    if thread is not None:
        thread.join(30)
        assert not thread.is_alive()
    assert loop.gang.link is None


def test_what_ends_the_start_is_raised_whatever_it_is(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: EngineLoop) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(EngineLoop, "start", fail)
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        AsyncLLM(folder, **OPTIONS)


def test_a_stream_whose_event_loop_is_closed_costs_nobody(folder: str) -> None:
    engine = AsyncLLM(folder, **OPTIONS)
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    left = asyncio.new_event_loop()
    stream = aiter(engine.generate(IDS, params))
    left.run_until_complete(anext(stream))
    left.close()

    async def whole() -> int:
        return sum([len(piece.token_ids) async for piece in engine.generate(IDS, params)])

    assert asyncio.run(asyncio.wait_for(whole(), 30)) == 120
    engine.close()
    del stream


@pytest.mark.parametrize("prompts", [[], [[]], [[1.5]], [["a"]], [None], 7, [[10**6]], [[-1]], [[1] * 500]])
def test_wrong_prompts_are_refused_before_anything_runs(llm: LLM, prompts: object) -> None:
    if prompts == []:
        assert llm.generate([]) == []
        return
    with pytest.raises(RequestError):
        llm.generate([IDS, *prompts] if isinstance(prompts, list) else prompts)  # type: ignore[arg-type]
    assert llm._loop.core is not None and not llm._loop.core.has_requests()


@pytest.mark.parametrize(("ask", "rule"), [
    (lambda llm: llm.generate([IDS], {"max_tokens": 2}), "sampling_params takes SamplingParams"),
    (lambda llm: llm.generate([IDS], 3), "sampling_params takes SamplingParams"),
    (lambda llm: llm.generate([IDS], []), "1 prompts but 0 sampling parameters"),
    (lambda llm: llm.generate([IDS], priority=["high"]), "priority takes a number for each"),
    (lambda llm: llm.generate([IDS], priority=[1, 2]), "priority takes a number for each"),
    (lambda llm: llm.chat([], chat_template_kwargs={"tools": []}), "chat_template_kwargs can't set 'tools'"),
    (lambda llm: llm.embed([IDS], truncate_prompt_tokens="3"), "truncate_prompt_tokens: Expected `int"),
    (lambda llm: llm.encode([IDS], pooling_task="token_embed"), "must be embed or classify, got 'token_embed'"),
])  # fmt: skip
def test_arguments_of_another_kind_are_refused_by_name(llm: LLM, ask: Callable[[LLM], object], rule: str) -> None:
    with pytest.raises(RequestError, match=rule):
        ask(llm)


def test_stop_strings_need_a_text(llm: LLM) -> None:
    params = SamplingParams(stop=["a"], detokenize=False)
    with pytest.raises(RequestError, match="detokenize=False makes none"):
        submissions("r", IDS, params, llm.facts, eos_ids=(), tokenizer=object())  # type: ignore[arg-type]


def test_a_model_may_be_a_path(folder: str) -> None:
    assert make_options(Path(folder), {}).model == folder


def test_one_stop_string_is_one() -> None:
    assert SamplingParams(stop="abc", bad_words="de").stop == ("abc",)  # type: ignore[arg-type]


def test_what_sleeps_goes_on_when_it_wakes(folder: str) -> None:
    """A batch of before gives the same after each level; while it sleeps nothing is asked of it."""
    with LLM(folder, **OPTIONS) as llm:
        expected = ids(llm, IDS, temperature=0, max_tokens=12)
        with pytest.raises(UserError, match="no level 3"):
            llm.sleep(3)
        for level in (0, 1, 2):
            llm.sleep(level)
            assert llm.is_sleeping
            with pytest.raises(UserError, match="wake_up"):
                llm.generate([IDS])
            if level:
                with pytest.raises(UserError, match="wake it first"):
                    llm.sleep(level - 1)
            llm.wake_up(["weights"])
            assert llm.is_sleeping
            llm.wake_up()
            assert not llm.is_sleeping and ids(llm, IDS, temperature=0, max_tokens=12) == expected
        with pytest.raises(ConfigError, match="tags all: is neither weights nor kv_cache"):
            llm.wake_up("all")


def test_who_stops_waiting_for_a_change_does_the_engine_no_harm(
    folder: str, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, held = AsyncLLM(folder, **OPTIONS), threading.Event()
    ask = engine._loop.sleeper.ask
    monkeypatch.setattr(engine._loop.sleeper, "ask", lambda *asked: held.wait(60) and ask(*asked))

    async def main() -> list[int]:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.sleep(), 0.01)
        held.set()
        await engine.wake_up()
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        return [token async for piece in engine.generate(IDS, params) for token in piece.token_ids]

    with contextlib.closing(engine):
        assert [asyncio.run(asyncio.wait_for(main(), 60))] == ids(llm, IDS, temperature=0, max_tokens=3)
        assert not engine.is_failed


def test_streams_wait_while_it_sleeps(folder: str, llm: LLM) -> None:
    (expected,) = ids(llm, IDS, temperature=0, max_tokens=40)
    engine = AsyncLLM(folder, **OPTIONS)

    async def main() -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        stream = aiter(engine.generate(IDS, params))
        tokens = list((await anext(stream)).token_ids)
        await engine.sleep(2)
        assert engine.is_sleeping
        late = asyncio.create_task(anext(aiter(engine.generate(IDS, params))))
        await engine.wake_up()
        async for piece in stream:
            tokens += piece.token_ids
        assert (await late).token_ids == tokens[: len((await late).token_ids)]
        return tokens

    assert asyncio.run(asyncio.wait_for(main(), 60)) == expected
    engine.close()
    with pytest.raises(EngineDead):
        asyncio.run(engine.sleep())
