"""Other weights of the same model, while requests run: what is open goes on with them, nothing of the old ones is used
again, and where they can't be had those of before stay."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from planaria import LLM, AsyncLLM, SamplingParams
from planaria.errors import ConfigError, ModelError, UserError
from planaria.executor import new_weights
from tests.model import checkpoints
from tests.proc.servers import wait_until

OPTIONS = {
    "dtype": "float32",
    "kv_cache_memory": "4MiB",
    "max_model_len": 256,
    "block_size": 16,
    "skip_tokenizer_init": True,
}
PROMPT = [(i * 7) % 50 for i in range(40)]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("weights")
    return [str(checkpoints.write_checkpoint(folder / f"{seed}", "llama", seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def told(folders: list[str]) -> list[list[int]]:
    """What each says."""
    found = []
    for folder in folders:
        with LLM(folder, **OPTIONS) as llm:
            found.append(tokens(llm))
    assert found[0] != found[1]
    return found


def tokens(llm: LLM) -> list[int]:
    return list(llm.generate([PROMPT], GREEDY)[0].outputs[0].token_ids)


def test_threads_of_kernels_go_on(folders: list[str], told: list[list[int]]) -> None:
    """To end them and to start others takes as long as a small model's step."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith("planaria-kernel")}

    before = threads()
    with LLM(folders[0], threads=2, **OPTIONS) as llm:
        own = threads() - before
        assert own and tokens(llm) == told[0]
        for which in (1, 0):
            llm.update_weights(folders[which])
            assert tokens(llm) == told[which] and threads() - before == own


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_comes_next_is_of_the_new_ones(folders: list[str], told: list[list[int]], ranks: int) -> None:
    """Prefixes of the old ones count for nothing, and those who come later read the new ones."""
    more = {"tensor_parallel_size": 2, "spare_workers": 1} if ranks > 1 else {}
    with LLM(folders[0], **OPTIONS, **more) as llm:
        assert [tokens(llm), tokens(llm)] == [told[0]] * 2
        for number, which in enumerate((1, 0, 1), 1):
            llm.update_weights(folders[which])
            assert llm.weights_version == number
            (choice,) = llm.generate([PROMPT], GREEDY)[0].outputs
            assert choice.weights_versions == [(0, number)] and choice.weights_version == number
            assert [tokens(llm), tokens(llm)] == [told[which]] * 2
        if ranks > 1:
            os.kill(llm._loop.gang.members[1].pid, signal.SIGKILL)
            assert tokens(llm) == told[1], "who replaces a rank has them too"
        llm.sleep(2)
        llm.update_weights(folders[0])
        llm.wake_up()
        assert tokens(llm) == told[0]


def test_the_same_folder_may_have_other_bytes(folders: list[str], told: list[list[int]], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(folders[0], folder)
    with LLM(str(folder), **OPTIONS) as llm:
        assert tokens(llm) == told[0]
        shutil.copy(f"{folders[1]}/model.safetensors", folder / "new")
        os.replace(folder / "new", folder / "model.safetensors")
        llm.update_weights(folder)
        assert tokens(llm) == told[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_where_they_cannot_be_had_those_of_before_stay(
    folders: list[str], told: list[list[int]], tmp_path: Path, ranks: int
) -> None:
    other = str(checkpoints.write_checkpoint(tmp_path / "other", "llama", 3, num_hidden_layers=3))
    torn = tmp_path / "torn"
    shutil.copytree(folders[1], torn)
    with LLM(folders[0], **OPTIONS, tensor_parallel_size=ranks) as llm:
        with pytest.raises(ConfigError, match="another model: num_layers 3"):
            llm.update_weights(other)
        size = os.path.getsize(torn / "model.safetensors")
        asked = llm._weights(torn)  # what is wrong shows to who reads it
        os.truncate(torn / "model.safetensors", size // 2)
        for level in (None, 2):
            if level is not None:
                llm.sleep(level)
            answer = llm._ask(asked, llm._loop.handle).result(60)
            assert answer.error and llm.weights_version == 0 and llm.is_sleeping == (level is not None), answer
            llm.wake_up()
            assert tokens(llm) == told[0]
        llm.update_weights(folders[1])
        assert tokens(llm) == told[1]


@pytest.mark.parametrize(("kept", "ranks"), [(False, 1), (True, 1), (True, 2)])
def test_streams_go_on_with_them(folders: list[str], told: list[list[int]], kept: bool, ranks: int) -> None:
    """Tokens that were told stay; the next ones are what the new weights say after them. kept: from KV of both, which
    nobody else finds."""
    engine, go = AsyncLLM(folders[0], **OPTIONS, tensor_parallel_size=ranks), threading.Event()
    core = engine._loop.core
    assert core is not None
    plan = core.plan

    def no_further(now: float) -> Any:
        """Until it has the new ones: it could have ended before they come."""
        begun = any(len(request.output) >= 4 for request in core.snapshot())
        return None if begun and not go.is_set() else plan(now)

    core.plan = no_further  # type: ignore[method-assign]

    versions, rest = list[int](), list[int]()

    async def main() -> tuple[list[int], int]:
        stream, found = aiter(engine.generate(PROMPT, GREEDY)), list[int]()
        while len(found) < 4:
            piece = await anext(stream)
            found += piece.token_ids
            versions.extend([piece.weights_version] * len(piece.token_ids))
        replayed = core.replayed_tokens
        await engine.update_weights(folders[1], keep_kv=kept)
        assert (core.replayed_tokens == replayed) == kept
        go.set()
        async for piece in stream:
            found += piece.token_ids
            versions.extend([piece.weights_version] * len(piece.token_ids))
        with pytest.raises(ModelError):
            await engine.update_weights("/nowhere/at/all")
        again = [token async for piece in engine.generate(PROMPT, GREEDY) for token in piece.token_ids]
        assert again == told[1]
        after = PROMPT + found[:-1]  # whose KV is there
        rest.extend([token async for piece in engine.generate(after, GREEDY) for token in piece.token_ids])
        return found, engine.weights_version

    try:
        found, version = asyncio.run(asyncio.wait_for(main(), 60))
    finally:
        engine.close()
    changed = versions.index(1)
    assert changed >= 4 and versions == [0] * changed + [1] * (len(found) - changed)
    assert version == 1 and len(found) == GREEDY.max_tokens and found[:4] == told[0][:4]
    with LLM(folders[1], **OPTIONS) as llm:
        assert llm.generate([PROMPT + found[:-1]], GREEDY)[0].outputs[0].token_ids == rest
        if not kept:
            same = next(i for i in range(len(found) + 1) if found[:i] != told[0][:i]) - 1
            params = SamplingParams(temperature=0, max_tokens=len(found) - same, ignore_eos=True)
            assert llm.generate([PROMPT + found[:same]], params)[0].outputs[0].token_ids == found[same:]


class Preparing:
    """A process that prepares weights, and says what a test wants."""

    said = ended = ""

    def kill(self) -> None:
        self.ended = "was killed"


@pytest.mark.parametrize("says", ["ready", "model these are no weights", ""])
def test_steps_go_on_while_they_are_prepared(
    folders: list[str], told: list[list[int]], monkeypatch: pytest.MonkeyPatch, says: str
) -> None:
    """What is wrong with them is known with nothing changed; where who prepares them ends, ranks read them."""
    engine, child = AsyncLLM(folders[0], **OPTIONS), Preparing()
    begun, loops = asyncio.Event(), list[asyncio.AbstractEventLoop]()

    def beside(gang: Any, config: Any) -> list[Preparing]:
        loops[0].call_soon_threadsafe(begun.set)
        return [child]

    monkeypatch.setattr(new_weights, "beside", beside)

    async def main() -> list[int]:
        loops.append(asyncio.get_running_loop())
        update = asyncio.create_task(engine.update_weights(folders[1]))
        await begun.wait()
        async for piece in engine.generate(PROMPT, GREEDY):
            last = piece
        assert last.weights_version == 0 and not update.done(), "all of it came meanwhile"
        with pytest.raises(UserError, match="others are on their way"):
            await engine.update_weights(folders[1])
        epoch = engine._loop.gang.epoch
        child.said, child.ended = says, "" if says else "was killed by signal 9"
        engine._loop._on_exit()
        if says.startswith("model"):
            with pytest.raises(UserError, match="these are no weights"):
                await update
            assert engine._loop.gang.epoch == epoch and engine.weights_version == 0
        else:
            await update
            assert engine.weights_version == 1
        assert child.ended, "nobody prepares anything any more"
        return [token async for piece in engine.generate(PROMPT, GREEDY) for token in piece.token_ids]

    try:
        assert asyncio.run(asyncio.wait_for(main(), 60)) == told[0 if says.startswith("model") else 1]
    finally:
        engine.close()


MIXTURE = {
    "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("family", "shape", "options"),
    [
        ("qwen2_moe", MIXTURE, {"data_parallel_size": 2}),  # slices of experts
        ("qwen2_moe", MIXTURE, {"tensor_parallel_size": 2, "enable_expert_parallel": True, "spare_workers": 1}),
        pytest.param("llama", {}, {"kernels": "torch", "distributed_executor_backend": "mp"}, marks=pytest.mark.long),
        ("phi", {}, {"tensor_parallel_size": 2}),  # run by Transformers' code
    ],
    ids=["slices", "experts", "torch", "transformers"],
)
def test_ranks_read_nothing_in_the_pause(
    tmp_path: Path, family: str, shape: dict[str, Any], options: dict[str, Any]
) -> None:
    """They map all that was packed beside them, and compute with what they would have read."""
    own = [str(checkpoints.write_checkpoint(tmp_path / str(seed), family, seed, **shape)) for seed in (1, 2)]
    with LLM(own[1], **OPTIONS) as llm:
        wanted = tokens(llm)
    engine = AsyncLLM(own[0], **OPTIONS, **options, worker_extension_cls="tests.proc.extensions.Mapped")

    async def told() -> list[int]:
        return [token async for piece in engine.generate(PROMPT, GREEDY) for token in piece.token_ids]

    async def main() -> None:
        assert await told() != wanted
        await engine.update_weights(own[1])
        assert await told() == wanted
        assert set(await engine.collective_rpc("own_bytes", 60)) == {0}
        os.kill(engine._loop.gang.members[0].pid, signal.SIGKILL)
        assert await told() == wanted

    try:
        asyncio.run(asyncio.wait_for(main(), 120))
    finally:
        engine.close()


def test_where_there_is_no_room_for_both_it_is_said(
    folders: list[str], told: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folders[0], **OPTIONS) as llm:
        monkeypatch.setattr(new_weights, "available_memory", lambda: 1000)
        asked = llm._weights(folders[1], beside=True)
        assert "have no room beside those in force" in llm._ask(asked, llm._loop.handle).result(60).error
        assert llm.weights_version == 0 and tokens(llm) == told[0]


def test_those_of_before_are_given_back(folders: list[str]) -> None:
    """Also by ranks in reserve."""
    with LLM(folders[0], **OPTIONS, tensor_parallel_size=2, spare_workers=1) as llm:
        memory, _ = llm._loop.gang.owns
        wait_until("the spare is ready", lambda: all(spare.said for spare in llm._loop.gang.launcher.pool.spares))
        before = os.fstat(memory.fileno()).st_blocks
        llm.update_weights(folders[1])

        def given_back() -> bool:
            memory.tidy()
            return os.fstat(memory.fileno()).st_blocks <= before

        wait_until("they are", given_back)


def test_a_rank_that_is_lost_before_it_is_an_answer(folders: list[str], told: list[list[int]]) -> None:
    """It waits for what is on its way, which comes to nothing: who asked is told, and may ask again."""
    with LLM(folders[0], **OPTIONS, tensor_parallel_size=2) as llm:
        assert tokens(llm) == told[0]
        os.kill(llm._loop.gang.members[1].pid, signal.SIGSTOP)
        llm._loop.call("resident")  # of which one rank tells nothing
        os.kill(llm._loop.gang.members[1].pid, signal.SIGKILL)
        with pytest.raises(UserError, match="ask again"):
            llm.update_weights(folders[1])
        assert llm.weights_version == 0 and tokens(llm) == told[0]
        llm.update_weights(folders[1])
        assert tokens(llm) == told[1]
