"""Drafts change how many steps tokens take, and nothing else: the same tokens, log-probabilities and ends, whatever the
requests ask for and however the model is spread, also when a rank dies."""

from __future__ import annotations

import json
import os
import signal
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planaria import LLM, SamplingParams
from planaria.config.options import SchedulerConfig
from planaria.errors import ConfigError, ModelError, UserError
from planaria.kernels.ops import Batch
from planaria.protocol import Fresh, Row
from planaria.worker import draft_sizes
from planaria.worker.draft_model import DraftHead
from planaria.worker.runner import Runner
from planaria.worker.sampler import Follower
from planaria.worker.speculation import GUESSES, Speculation
from planaria.worker.stage import Stage
from tests.model import checkpoints
from tests.model.drafters import BOOK

OPTIONS: dict[str, Any] = {"max_model_len": 256, "skip_tokenizer_init": True, "threads": 1, "dtype": "float32"}
EAGER = "tests.model.drafters.Eager"  # else it depends on the machine whether any are drafted
DRAFTS: dict[str, Any] = {
    "worker_cls": EAGER,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 6},
    "sd_worker_cls": "tests.model.drafters.Book",
}
PROMPTS = [[5, 9, 2, 7, 11], [3] * 20, list(range(4, 60)), [8, 1], [100, 20, 30] * 12]
PLAIN = SamplingParams(max_tokens=40)
ASKED: list[tuple[list[int], dict[str, Any]]] = [
    (PROMPTS[0], {"temperature": 0}),
    (PROMPTS[1], {"seed": 1, "temperature": 1.3, "top_p": 0.9, "top_k": 20}),
    (PROMPTS[2], {"seed": 2, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.7}),
    (PROMPTS[3], {"seed": 3, "n": 3, "logprobs": 3}),
    (PROMPTS[4], {"seed": 4, "min_tokens": 20, "stop_token_ids": list(range(40, 60)), "logprobs": 0}),
    (PROMPTS[0], {"temperature": 0, "logit_bias": {17: 3.0, 18: -5.0}, "max_tokens": 7}),
    (PROMPTS[1], {"seed": 6, "allowed_token_ids": list(range(30, 90)), "prompt_logprobs": 2}),
    (PROMPTS[2][:30], {"temperature": 0, "bad_words_ids": ((33,), (44, 45)), "stop_token_ids": [50, 51]}),
    (PROMPTS[3], {"seed": 8, "max_tokens": 1}),
]


def answers(llm: LLM, on_tokens: Any = None) -> list[Any]:
    """All that a user sees of them."""
    asked = [SamplingParams(**{"ignore_eos": True, "max_tokens": 60, **given}) for _, given in ASKED]
    found = []
    for output in llm.generate([prompt for prompt, _ in ASKED], asked, on_tokens=on_tokens, use_tqdm=False):
        assert [choice.error for choice in output.outputs if choice.error] == []
        found.append(
            [(c.token_ids, c.logprobs, c.finish_reason, c.stop_reason) for c in output.outputs]
            + [output.prompt_logprobs]
        )
    return found


def tokens(answers: list[Any]) -> list[Any]:
    """And why they ended."""
    return [[(ids, finish, stop) for ids, _, finish, stop in given[:-1]] for given in answers]


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> tuple[str, list[Any]]:  # type: ignore[no-untyped-def]
    """A tiny model, and its answers without drafts; a book of them lies beside it."""
    folder = checkpoints.write_checkpoint(tmp_path_factory.mktemp("drafts"), "llama")
    with LLM(str(folder), kv_cache_memory="8MiB", **OPTIONS) as llm:
        plain = answers(llm)
    book = [prompt + choice[0] for (prompt, _), told in zip(ASKED, plain, strict=True) for choice in told[:-1]]
    (Path(folder) / BOOK).write_text(json.dumps(book))
    return str(folder), plain


CASES: dict[str, dict[str, Any]] = {
    "one rank": {"kv_cache_memory": "8MiB"},
    "planned ahead, little memory": {
        "kv_cache_memory": "160KiB", "async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": 8,
    },
    "tensor ranks": {"kv_cache_memory": "8MiB", "tensor_parallel_size": 2},
    "stages": {"kv_cache_memory": "8MiB", "pipeline_parallel_size": 2},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_same_answers_in_fewer_steps(told: tuple[str, list[Any]], case: str) -> None:
    folder, plain = told
    with LLM(folder, **OPTIONS, **DRAFTS, **CASES[case]) as llm:
        found = answers(llm)
        if "size" in str(CASES[case]):  # other sums, so other log-probabilities in their last bits
            found, plain = tokens(found), tokens(plain)
        assert found == plain
        drafts = llm.stats.drafts
        assert drafts is not None and sum(drafts.accepted) > 30, drafts
        if "size" in str(CASES[case]):  # and once more, with a rank that dies meanwhile
            harmed: list[int] = []

            def harm(done: int, tokens: int) -> None:
                if not harmed and llm.stats.generation_tokens > drafts.drafted and tokens:
                    harmed.append(llm._loop.gang.members[-1].pid)
                    os.kill(harmed[0], signal.SIGKILL)

            assert tokens(answers(llm, harm)) == plain and harmed and llm._loop.gang.epoch == 1


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_methods_find_what_was_there_before(told: tuple[str, list[Any]], method: str) -> None:
    """Of two tokens, so that every few have been there."""
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True, allowed_token_ids=[40, 41])

    def answer(**options: Any) -> tuple[list[int], Any]:
        with LLM(told[0], kv_cache_memory="8MiB", **options, **OPTIONS) as llm:
            (output,) = llm.generate([PROMPTS[1]], params, use_tqdm=False)
            return output.outputs[0].token_ids, llm.stats

    plain, before = answer()
    drafted, after = answer(speculative_config=json.dumps({"method": method}), worker_cls=EAGER)
    assert drafted == plain and before.drafts is None
    assert sum(after.drafts.accepted) > 0 and after.step < before.step


def test_a_model_drafts(told: tuple[str, list[Any]], tmp_path: Path) -> None:
    """The same one, which is mostly right; and one that hardly ever is. Histories longer than it computes in a step."""
    folder, plain = told
    other = checkpoints.write_checkpoint(tmp_path, "llama", seed=1, num_hidden_layers=1)
    for model, tokens in ((folder, 3), (str(other), 3)):
        said = {"model": model, "num_speculative_tokens": tokens}
        with LLM(folder, kv_cache_memory="8MiB", speculative_config=said, worker_cls=EAGER, **OPTIONS) as llm:
            assert answers(llm) == plain
            drafts = llm.stats.drafts
            assert drafts is not None and drafts.drafted > 0
            assert model != folder or all_are_right(llm)
    with pytest.raises(ConfigError, match="has 67 tokens, and the model that is served 131"):
        other = checkpoints.write_checkpoint(tmp_path / "small", "llama", vocab_size=67)
        LLM(folder, speculative_config={"model": str(other)}, **OPTIONS)


def all_are_right(llm: LLM) -> bool:
    """Of a greedy request, where the model drafts for itself: of each step that checks some, the first."""
    before = llm.stats.drafts
    llm.generate([PROMPTS[2]], SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    after = llm.stats.drafts
    assert before is not None and after is not None
    return 0 < after.checks - before.checks == after.accepted[0] - before.accepted[0]


LONG = pytest.mark.long
SPREAD = [
    pytest.param(True, False, 1, 1, 1, marks=LONG),
    pytest.param(True, False, 2, 1, 1, marks=LONG),
    pytest.param(True, True, 2, 2, 1, marks=LONG),
    pytest.param(False, True, 2, 1, 1),
    pytest.param(False, True, 2, 2, 1, marks=LONG),
    pytest.param(True, True, 2, 1, 1),
    pytest.param(True, False, 1, 1, 2),
    pytest.param(True, True, 2, 2, 2, marks=LONG),
    pytest.param(False, True, 2, 1, 2, marks=LONG),
]


@pytest.mark.parametrize(("head", "shared", "tp", "pp", "pcp"), SPREAD)
def test_models_and_heads_draft_over_ranks(
    told: tuple[str, list[Any]], tmp_path: Path, head: bool, shared: bool, tp: int, pp: int, pcp: int
) -> None:
    """The same model, and a random head; on the rank that draws or on all its tensor ranks; and with one that dies."""
    folder, plain = told
    drafts = checkpoints.write_head(tmp_path) if head else folder
    said: dict[str, Any] = {"model": str(drafts), "num_speculative_tokens": 3}
    said |= {"method": "eagle"} if head else {}
    said |= {"draft_tensor_parallel_size": 2} if shared else {}
    spread: dict[str, Any] = {
        "tensor_parallel_size": tp, "pipeline_parallel_size": pp, "prefill_context_parallel_size": pcp,
        "kv_cache_memory": "8MiB",
    }  # fmt: skip
    with LLM(folder, speculative_config=said, worker_cls=EAGER, **spread, **OPTIONS) as llm:
        assert tokens(answers(llm)) == tokens(plain)
        drafted = llm.stats.drafts
        assert drafted is not None and drafted.drafted > 0
        assert head or all_are_right(llm)
        if tp * pcp > 1:
            harmed: list[int] = []

            def harm(done: int, count: int) -> None:
                if not harmed and llm.stats.generation_tokens > 300 and count:
                    harmed.append(llm._loop.gang.members[-1].pid)
                    os.kill(harmed[0], signal.SIGKILL)

            assert tokens(answers(llm, harm)) == tokens(plain) and harmed and llm._loop.gang.epoch == 1


def test_what_a_head_guesses(told: tuple[str, list[Any]], tmp_path: Path) -> None:
    """What Transformers' layer makes of the same hidden states, one guess going into the next."""
    import torch
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModel

    folder, _ = told
    head = checkpoints.write_head(tmp_path)
    weights = load_file(head / "model.safetensors")
    served = checkpoints.load_reference(Path(folder))
    layer = AutoModel.from_config(AutoConfig.from_pretrained(head), attn_implementation="eager").eval()
    names = {name: value for name, value in weights.items() if name.startswith("layers.")}
    layer.load_state_dict(names, strict=False)
    layer.layers[0].input_layernorm, layer.norm = torch.nn.Identity(), torch.nn.Identity()

    @torch.no_grad()
    def guesses(history: list[int], most: int) -> list[int]:
        hidden = served.model(torch.tensor([history[:-1]])).last_hidden_state
        ids, found = history[1:], []
        for _ in range(most):
            both = torch.cat([served.model.embed_tokens(torch.tensor([ids])), hidden], -1)
            made = layer(inputs_embeds=both @ weights["fc.weight"].T + weights["fc.bias"]).last_hidden_state
            found.append(int(served.lm_head(made[:, -1:]).argmax()))
            ids, hidden = [*ids, found[-1]], torch.cat([hidden, made[:, -1:]], 1)
        return found

    seen: list[tuple[list[int], list[int]]] = []
    draft = DraftHead._drafts

    def heard(self: DraftHead, wanted: Any) -> Any:
        for row, made in (found := draft(self, wanted)).items():
            seen.append((list(self.histories[row]), list(made)))
        return found

    said = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DraftHead, "_drafts", heard)
        patch.setattr(
            draft_sizes, "LONGEST", draft_sizes.LOOK_AGAIN
        )  # it is asked again and again, though always wrong
        with LLM(folder, kv_cache_memory="8MiB", speculative_config=said, worker_cls=EAGER, **OPTIONS) as llm:
            params = [SamplingParams(temperature=1, seed=i, max_tokens=90, ignore_eos=True) for i in range(2)]
            llm.generate([PROMPTS[0], PROMPTS[2]], params, use_tqdm=False)
    some = [each for each in seen if each[1]]
    assert len(some) > 6 and any(len(history) > 100 for history, _ in some)
    for history, made in some:
        assert guesses(history, len(made)) == made


def test_what_is_no_head(told: tuple[str, list[Any]], tmp_path: Path) -> None:
    folder, _ = told
    options = {**OPTIONS, "kv_cache_memory": "8MiB"}
    with pytest.raises(ModelError, match=r"no tensor fc\.weight"):
        LLM(folder, speculative_config={"method": "eagle", "model": folder}, **options)
    wide = checkpoints.write_head(tmp_path, hidden_size=128)
    with pytest.raises(ConfigError, match="has 128 columns in a hidden state, and the model that is served 64"):
        LLM(folder, speculative_config={"method": "eagle", "model": str(wide)}, **options)
    for said in ({"method": "ngram"}, {"model": folder}):
        with pytest.raises(ConfigError, match="draft_tensor_parallel_size 2: must be 1, or"):
            LLM(folder, speculative_config={"draft_tensor_parallel_size": 2, **said}, **options)


@pytest.mark.row("P17")
def test_what_is_no_token_is_not_looked_up(told: tuple[str, list[Any]]) -> None:
    """And a class of the user's drafts in a model's place."""
    folder, plain = told
    options = {**OPTIONS, "kv_cache_memory": "8MiB", "speculative_config": {"model": folder}}
    with LLM(folder, sd_worker_cls="tests.model.drafters.Wild", worker_cls=EAGER, **options) as llm:
        assert answers(llm) == plain
        drafts = llm.stats.drafts
        assert drafts is not None and 0 < drafts.drafted <= drafts.checks
        assert llm.collective_rpc(lambda worker: worker.draft._weights is None) == [True]


class Guesser:
    """A drafter that is right, and writes down what it was asked for."""

    looks_up = True

    def __init__(self) -> None:
        self.asked: list[dict[int, int]] = []

    def enter(self, *given: Any) -> None:
        pass

    extend = leave = enter

    def draft(self, wanted: Mapping[int, int]) -> Mapping[int, Sequence[int]]:
        self.asked.append(dict(wanted))
        return {row: [7] * most for row, most in wanted.items()}

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("looks_up", "drawn", "drafts"), [(True, 7, True), (True, 8, False), (False, 7, False)])
def test_what_drafts_are_worth_is_learned_while_there_are_none(looks_up: bool, drawn: int, drafts: bool) -> None:
    """Rows whose drafts were wrong get none, and get some again as soon as they would have been right."""
    guesser = Guesser()
    guesser.looks_up = looks_up
    speculation = Speculation(8, 2, 100, Batch(32, 8, 8, 32), guesser)
    times = speculation.sizes.times
    for tokens in range(1, 30):
        times.saw(tokens, 1 + 0.2 * tokens)
    for row in range(6):
        speculation.enter(row, Fresh(array("i", [1, 2]), 2, PLAIN, 0))
        for _ in range(20):
            speculation.sizes.checked(row, 1, 0)
    rows = list(range(6))
    for _ in range(24):
        told = speculation.go_on(rows, [[drawn] for _ in rows], [0] * 6, alone=False)
        assert drafts or sum(guesser.asked[-1].values() if guesser.asked else ()) <= GUESSES
    assert {line[2] > 0 for line in told} == {drafts}


class Late(Stage):
    """Of a rank before the last: what others say of its steps lies in `messages`."""

    def __init__(self, batch: Batch, width: int) -> None:
        super().__init__(batch, lambda: None, width=width)
        self.samples, self._waits = False, True
        self.messages: list[list[list[int]]] = []

    def run(self, last: Any = None) -> None:
        return None

    def _receive_tokens(self, count: int) -> Any:
        told = np.array(self.messages.pop(0), np.int32)
        assert told.shape == (count, self.width)
        return told


def test_what_is_told_of_a_row_is_not_for_who_came_after() -> None:
    """With stages the message about a step may be read when its row belongs to another request, of another turn."""
    batch = Batch(32, 4, 8, 16)
    speculation = Speculation(4, 2, 100, batch, None)
    stage = Late(batch, speculation.width)
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=64, max_drafts=2)
    runner = Runner(batch, lambda: None, Follower(4, 100), config, 16, stage, speculation=speculation)

    def enters(row: int, tokens: list[int], block: int) -> Row:
        fresh = Fresh(array("i", tokens), len(tokens), PLAIN, 0, (), 2)
        return Row(row, 0, len(tokens), (block,), True, fresh)

    runner.step(1, (enters(0, [5, 6, 7], 1),), (), 0)
    stage.messages = [[[1, 8, 2, 9, 10]]]
    runner.step(2, (), (), 0)
    assert batch.tokens[:3].tolist() == [8, 9, 10] and batch.positions[:3].tolist() == [3, 4, 5]
    runner.step(3, (enters(0, [20, 21], 2),), (0,), 1)  # the row is another's, in the other turn
    stage.messages = [[[3, 11, 2, 12, 13]], [[1, 22, 0, 0, 0]]]
    runner.step(4, (), (), 0)
    assert batch.counts[0] == 0
    runner.step(5, (), (), 1)
    assert batch.tokens[:1].tolist() == [22] and batch.positions[:1].tolist() == [2] and batch.counts[0] == 1


def test_a_class_that_cannot_draft(told: tuple[str, list[Any]]) -> None:
    options = {**OPTIONS, "kv_cache_memory": "8MiB", "speculative_config": {"method": "ngram"}}
    with pytest.raises(UserError, match="Silent: has no enter, extend, leave, close"):
        LLM(told[0], sd_worker_cls="tests.model.drafters.Silent", **options)
    with pytest.raises(ConfigError, match="--sd-worker-cls"):
        LLM(told[0], sd_worker_cls="nowhere.at_all.Class", **options)
