"""New weights from tensors in memory of the node: of this process or of another, and what isn't let in."""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from planaria import LLM, AsyncLLM, SharedWeights
from planaria.checkpoint.identity import weights_digest, weights_version
from planaria.config.options import EngineOptions
from planaria.config.resolve import other_tensors, resolve
from planaria.errors import ConfigError, ModelError, PlanariaError, UserError
from planaria.wire import FromEngine, Recovery
from tests.model import checkpoints
from tests.model.test_new_weights import GREEDY, OPTIONS, PROMPT, folders, tokens, told

__all__ = ["folders", "told"]  # fixtures
Tensors = dict[str, Any]


def memory_files() -> list[str]:
    """That are open here."""
    links = (os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd"))
    return [link for link in links if "planaria-tensors" in link]


def of(folder: str) -> Tensors:
    return dict(load_file(f"{folder}/model.safetensors"))


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_comes_next_is_of_the_tensors(folders: list[str], told: list[list[int]], ranks: int) -> None:
    """In the order of turns of a loop that learns; who replaces a rank has them too, though nobody else does."""
    with LLM(folders[0], **OPTIONS, tensor_parallel_size=ranks) as llm:
        assert tokens(llm) == told[0]
        for number, which in enumerate((1, 0, 1), 1):
            llm.update_weights(tensors=iter(of(folders[which]).items()) if number == 2 else of(folders[which]))
            assert llm.weights_version == number and list(llm._shared) == [number], "those of before were let go of"
            assert tokens(llm) == told[which]
        gc.collect()
        if ranks > 1:
            os.kill(llm._loop.gang.members[1].pid, signal.SIGKILL)
            assert tokens(llm) == told[1]
        llm.sleep(2)
        llm.wake_up()
        assert tokens(llm) == told[1]
        llm.update_weights(folders[0])
        assert tokens(llm) == told[0] and not llm._shared
        llm.update_weights(tensors=of(folders[1]))
    assert not memory_files(), "with the engine its weights end"


OWNER = """
import sys
from safetensors.numpy import load_file
from planaria import SharedWeights
weights = SharedWeights(load_file(sys.argv[1]))
print(weights.handle, flush=True)
sys.stdin.read()
"""


def test_another_process_may_have_them_and_end(folders: list[str], told: list[list[int]]) -> None:
    owner = [sys.executable, "-c", OWNER, f"{folders[1]}/model.safetensors"]
    with subprocess.Popen(owner, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        handle = process.stdout.readline().strip()

        async def main() -> int:
            await engine.update_weights(handle=handle)
            process.kill()
            process.wait(30)
            with pytest.raises(ModelError, match=f"process {process.pid} shares no such memory any more"):
                await engine.update_weights(handle=handle)
            await engine.sleep(2)
            await engine.wake_up()  # read again, from what is held here
            found = [token async for piece in engine.generate(PROMPT, GREEDY) for token in piece.token_ids]
            assert found == told[1]
            return engine.weights_version

        engine = AsyncLLM(folders[0], **OPTIONS)
        try:
            assert asyncio.run(asyncio.wait_for(main(), 60)) == 1
        finally:
            engine.close()


def unsealed() -> Iterator[str]:
    """Of a writer that hasn't come to the end."""
    fd = os.memfd_create("half", os.MFD_ALLOW_SEALING)
    os.write(fd, b"x" * 100)
    yield f"memory:{os.getpid()}.{fd}.{os.fstat(fd).st_ino}@{HOME}"
    os.close(fd)


def a_file(path: Path) -> str:
    return f"memory:{os.getpid()}.{os.open(path, os.O_RDONLY)}.{path.stat().st_ino}@{HOME}"


with SharedWeights({"a": np.zeros(1)}) as _any:
    HOME = _any.handle.partition("@")[2]


def test_handles_that_are_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")
    half = unsealed()
    pipe, _ = os.pipe()
    mine = os.getpid()
    with SharedWeights({"a": np.zeros(1)}) as weights:
        good, number = weights.handle, weights._fd
        with SharedWeights.held(good) as held:
            assert held.handle != good
        assert weights_digest([good]) and weights_version([good]) != weights_version(["/nowhere"])
    for handle, why in (
        (good, f"process {mine} shares no such memory any more"),
        (f"memory:{mine}.{number}.1@{HOME}", "no such memory any more"),
        (f"memory:{mine}.{pipe}.{os.fstat(pipe).st_ino}@{HOME}", "no such memory any more"),
        (a_file(file), "is no memory file"),
        (next(half), "isn't sealed"),
        (good.replace("@", "@x"), "of another node"),
        ("/etc/passwd", "is no handle"),
        (f"memory:1.2.3@{'x' * 10_000}\n", "is no handle"),
    ):
        with pytest.raises(ModelError, match=why) as e:
            SharedWeights.held(handle)
        assert len(str(e.value)) < 250


def test_they_can_be_read_and_not_written(folders: list[str]) -> None:
    with SharedWeights(of(folders[0])) as weights:
        with pytest.raises(PermissionError), open(f"/proc/self/fd/{weights._fd}", "r+b") as file:
            file.write(b"x")
        with pytest.raises(PermissionError):
            os.truncate(f"/proc/self/fd/{weights._fd}", 0)
        assert fcntl.fcntl(weights._fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL


WRONG: list[tuple[Callable[[Tensors], object], str]] = [
    (lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing; give all tensors under the names"),
    (lambda t: [t.pop(name) for name in list(t)[1:]], r", .* and \d+ more are missing"),
    (lambda t: t.update(more=np.zeros(3)), "more is not of this model"),
    (lambda t: t.update({"model.norm.weight": np.zeros(3, np.float32)}), r"has shape \[3\], the engine's \[64\]"),
    (lambda t: t.update({"model.norm.weight": np.zeros(64, np.int64)}), "is of i64, the engine's of f32"),
    (lambda t: t.update({"model.norm.weight": np.zeros(64, complex)}), "is of complex128; known: float64"),
    (lambda t: t.update({"model.norm.weight": [1.0] * 64}), "is a list; give NumPy arrays or torch tensors"),
    (lambda t: t.update({7: np.zeros(1)}), "tensor 7: its name isn.t one"),
    (lambda t: t.clear(), "there are no tensors"),
    (lambda t: t.update({"x" * (9 << 20): np.zeros(1)}), "have names of"),
]


@pytest.mark.parametrize(("change", "why"), WRONG)
def test_what_is_wrong_is_told_at_the_door(folders: list[str], change: Callable[[Tensors], object], why: str) -> None:
    config, tensors = resolve(EngineOptions(model=folders[0], **OPTIONS)), of(folders[0])
    change(tensors)
    with pytest.raises(ModelError, match=why) as e:
        other_tensors(config, SharedWeights(tensors))
    assert len(str(e.value)) < 700
    del e
    gc.collect()
    assert not memory_files(), "no memory is left"


def test_a_name_may_come_once() -> None:
    with pytest.raises(ModelError, match="tensor a is there twice"):
        SharedWeights(("a", np.zeros(1)) for _ in range(2))


def test_engines_that_cannot_have_any(folders: list[str]) -> None:
    import msgspec

    config = resolve(EngineOptions(model=folders[0], **OPTIONS))
    replace = msgspec.structs.replace
    with SharedWeights(of(folders[0])) as weights:
        nodes = replace(config, parallel=replace(config.parallel, nnodes=2))
        with pytest.raises(ConfigError, match="can't be seen from 2 nodes; write them to a folder that all see"):
            other_tensors(nodes, weights)
        packed = replace(config, checkpoint={**config.checkpoint, "format": "gguf"})
        with pytest.raises(ConfigError, match="can't take the place of a gguf file's"):
            other_tensors(packed, weights)
        with LLM(folders[0], **OPTIONS) as llm:
            for given in ({}, {"path": folders[0], "handle": weights.handle}):
                with pytest.raises(ConfigError, match="takes one of path, tensors and handle"):
                    llm.update_weights(**given)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_values_come_as_they_are(tmp_path: Path, kind: torch.dtype) -> None:
    """Of each float kind, also of tensors that lie otherwise in memory, and with a tied head that has a name."""
    folder = checkpoints.write_checkpoint(tmp_path, "llama", 5, tie_word_embeddings=True)
    tensors = of(str(folder))
    assert "lm_head.weight" not in tensors
    with LLM(str(folder), **OPTIONS) as llm:
        want = tokens(llm)
    given = {name: tensor.t().contiguous().t() if tensor.dim() == 2 else tensor for name, tensor in tensors.items()}
    if kind == torch.float64:
        given = {name: tensor.to(kind) for name, tensor in given.items()}
    else:
        given = {name: tensor.to(kind) for name, tensor in given.items()}
        rounded = {name: tensor.float() for name, tensor in given.items()}
        with LLM(str(folder), **OPTIONS) as llm:
            llm.update_weights(tensors=rounded)
            want = tokens(llm)
    other = checkpoints.write_checkpoint(tmp_path / "other", "llama", 6, tie_word_embeddings=True)
    with LLM(str(other), **OPTIONS) as llm:
        llm.update_weights(tensors={**given, "lm_head.weight": given["model.embed_tokens.weight"]})
        assert tokens(llm) == want
        llm.update_weights(tensors={name: tensor.numpy() for name, tensor in rounded.items()} if kind == torch.float16
                           else given)  # fmt: skip
        assert tokens(llm) == want


def test_what_one_rank_cannot_have_nobody_has(folders: list[str], told: list[list[int]]) -> None:
    with LLM(folders[0], **OPTIONS, tensor_parallel_size=2, worker_cls="tests.proc.custom.Unlucky") as llm:
        with pytest.raises(UserError, match="no luck"):
            llm.update_weights(tensors=of(folders[1]))
        assert llm.weights_version == 0 and not llm._shared and tokens(llm) == told[0]
        llm.update_weights(tensors=of(folders[1]))
        assert llm.weights_version == 2 and tokens(llm) == told[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_in_the_middle(folders: list[str], told: list[list[int]], rank: int) -> None:
    """There is one version on all ranks, and it is the one that is told."""
    with LLM(folders[0], **OPTIONS, tensor_parallel_size=2) as llm:
        assert tokens(llm) == told[0]
        hear, killed = llm._hear, list[int]()

        def kill(message: FromEngine) -> None:
            if isinstance(message, Recovery) and message.kind == "layout" and not message.seconds and not killed:
                killed.append(llm._loop.gang.members[rank].pid)
                os.kill(killed[0], signal.SIGKILL)
            hear(message)

        llm._hear = kill  # type: ignore[method-assign]
        try:
            llm.update_weights(tensors=of(folders[1]))
        except PlanariaError:
            assert llm.weights_version == 0
        assert killed and killed[0] not in [member.pid for member in llm._loop.gang.members]
        assert tokens(llm) == told[llm.weights_version]
        assert set(llm._shared) <= {llm.weights_version}
