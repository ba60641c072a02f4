"""Text to token ids and back, and chat templates. No torch.

A `tokenizer.json` is read by `tokenizers` directly (0.1 s); `transformers` is imported only for a model that has
none. What a token is as bytes comes from one table, so that whole and incremental decoding can't disagree.
"""

from __future__ import annotations

import copy
import functools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planaria.checkpoint.files import descriptor, opened
from planaria.checkpoint.spec import Checkpoint
from planaria.errors import ModelError, RequestError
from planaria.server.messages import check_messages

if TYPE_CHECKING:
    import tokenizers


LONG_TEXT = 2000  # characters from which a text is tokenised beside other work


class Pieces(dict[int, bytes]):
    """Token id -> the bytes it adds to the text, filled in on first use. An id that isn't a token adds nothing. texts:
    of tokens that are whole characters, filled in by who decodes them."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self.texts: dict[int, str] = {}

    def __missing__(self, token: int) -> bytes:
        skip = self._skip and token in self._tokenizer.special_ids
        piece = self[token] = b"" if skip else self._tokenizer.token_bytes(token)
        return piece


class Tokenizer:
    """One model's tokenizer.

    `eos_ids` end a generation (the generation configuration's, the configuration's, the tokenizer's own). `pieces` is
    None for the rare decoder that isn't a table of bytes.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        name: str,
        eos_ids: tuple[int, ...] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self.backend = backend
        self.name = name
        self.special_tokens = dict(special_tokens or {})  # "bos_token" -> its text
        self.chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        own = self.special_tokens.get("eos_token")
        own_id = backend.token_to_id(own) if own else None
        self.eos_ids = tuple(dict.fromkeys([*eos_ids, *([own_id] if own_id is not None else [])]))
        self.vocab_size: int = max((backend.get_vocab_size(with_added_tokens=True), *(i + 1 for i in added)))
        self._decoder, self.strip_space = _decoder_kind(backend)
        self.pieces: tuple[Pieces, Pieces] | None = (
            (Pieces(self, False), Pieces(self, True)) if self._decoder != "other" else None
        )
        self._template: ChatTemplate | None = None
        self._showing: dict[tuple[str, ...], Tokenizer] = {}

    def showing(self, marks: tuple[str, ...]) -> Tokenizer:
        """The same tokenizer, to which those of `marks` that are special tokens are ordinary ones: they are text, also
        where special tokens are skipped."""
        hidden = self.special_ids.intersection(map(self.backend.token_to_id, marks))
        if not hidden:
            return self
        if marks not in self._showing:
            shown = self._showing[marks] = copy.copy(self)
            shown.special_ids = self.special_ids - hidden
            if self.pieces is not None:
                shown.pieces = (self.pieces[False], Pieces(shown, True))
        return self._showing[marks]

    @property
    def measured(self) -> bool:
        """Is `longest_token` known?"""
        return "longest_token" in vars(self)

    @functools.cached_property
    def longest_token(self) -> int:
        """In characters. Takes as long as there are tokens; they are looked at one by one, and other threads run on."""
        backend, longest = self.backend, 1
        for id in range(backend.get_vocab_size()):
            token = backend.id_to_token(id)
            if token is None:  # numbers that no token has
                return max(map(len, backend.get_vocab()))
            longest = max(longest, len(token))
        return longest

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; with `add_special_tokens`, what the model's post-processor adds (often a BOS)."""
        if len(text) > LONG_TEXT:  # as a batch the library lets other threads run meanwhile
            return self.encode_batch([text], add_special_tokens)[0]
        ids: list[int] = self.backend.encode(_clean(text), add_special_tokens=add_special_tokens).ids
        return ids

    def encode_first(
        self, text: str, second: str | None, limit: int | None, add_special_tokens: bool = True
    ) -> list[int]:
        """`encode` of a text, or of two that are looked at together, of whose first tokens only so many are taken (of
        two, of the longer one) that there are at most `limit` with what the post-processor adds."""
        parts = [
            self.backend.encode(_clean(part), add_special_tokens=False) for part in (text, second) if part is not None
        ]
        added = self.backend.num_special_tokens_to_add(second is not None) if add_special_tokens else 0
        sizes = [len(part.ids) for part in parts]
        if limit is not None and sum(sizes) + added > limit:
            left = max(limit - added, 0)
            if len(parts) == 2:
                short = min(min(sizes), left // 2)
                sizes = [short, left - short] if sizes[0] <= sizes[1] else [left - short, short]
            else:
                sizes = [left]
            for part, size in zip(parts, sizes, strict=True):
                part.truncate(size)
        pair = parts[1] if len(parts) == 2 else None
        ids: list[int] = self.backend.post_process(parts[0], pair, add_special_tokens).ids
        return ids if limit is None else ids[:limit]

    def first_text(self, text: str, count: int) -> str:
        """As much of a text as its first tokens are made of."""
        text = _clean(text)
        offsets = self.backend.encode(text, add_special_tokens=False).offsets
        return text[: offsets[count - 1][1]] if len(offsets) > count else text

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """`encode` of several texts, in parallel."""
        batch = self.backend.encode_batch([_clean(t) for t in texts], add_special_tokens=add_special_tokens)
        return [e.ids for e in batch]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Bytes that aren't UTF-8 become U+FFFD."""
        if self.pieces is None:
            if skip_special_tokens:
                ids = [id for id in ids if id not in self.special_ids]
            text: str = self.backend.decode(list(ids), skip_special_tokens=False)
            return text
        pieces = self.pieces[skip_special_tokens]
        text = b"".join([pieces[i] for i in ids]).decode("utf-8", "replace")
        return text[1:] if self.strip_space and text.startswith(" ") else text

    def token_text(self, token: int) -> str:
        """One token as text, for people: special tokens by name, parts of a character as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes one token stands for; empty for an id that isn't a token."""
        try:
            text: str | None = self.backend.id_to_token(token)
        except OverflowError:
            text = None
        if text is None:
            return b""
        if self._decoder == "byte_level":
            try:
                return bytes([_BYTE_OF[c] for c in text])
            except KeyError:
                return text.encode()
        if self._decoder == "sentencepiece":
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                try:
                    return bytes.fromhex(text[3:5])
                except ValueError:
                    pass
            return text.replace("▁", " ").encode()
        text = self.backend.decode([token], skip_special_tokens=False)
        return text.encode()

    def apply_chat_template(
        self,
        messages: object,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt of a conversation, which `check_messages` says what it must be. continue_final_message: it ends
        within the last message, whoever's it is, and no answer is begun.

        Raises RequestError for messages that are none, without a template, or when the template refuses them.
        """
        checked = check_messages(messages)
        source = chat_template or self.chat_template
        if source is None:
            raise RequestError(
                f"the model {self.name} has no chat template; use /v1/completions, or give chat_template",
                param="messages", code="no_chat_template",
            )  # fmt: skip
        if self._template is None or self._template.source != source:
            self._template = ChatTemplate(source)
        if "developer" not in source:  # templates that don't know the role leave its messages out, or refuse them
            checked = [{**m, "role": "system"} if m["role"] == "developer" else m for m in checked]
        begun = add_generation_prompt and not continue_final_message
        values = {**self.special_tokens, **kwargs, "add_generation_prompt": begun, "tools": tools or None}
        text = self._template.render(checked, values)
        return _up_to(text, checked[-1]["content"]) if continue_final_message else text


# Names of apply_chat_template's own arguments, and those that would bring in code or fields refused elsewhere.
_RESERVED = frozenset({
    "self", "messages", "add_generation_prompt", "tools", "documents", "chat_template", "continue_final_message",
})  # fmt: skip


def check_variables(given: Mapping[str, Any]) -> None:
    """Raises RequestError for `chat_template_kwargs` that are no variables of a template."""
    if reserved := sorted(_RESERVED.intersection(given)):
        raise RequestError(
            f"chat_template_kwargs can't set {reserved[0]!r}", param="chat_template_kwargs", code="invalid_value"
        )


def _up_to(text: str, content: str) -> str:
    """A rendered conversation to the end of its last message's content, of which templates may cut spaces."""
    for said in (content, content.rstrip(), content.strip()):
        if said and (at := text.rfind(said)) >= 0:
            return text[: at + len(said)]
    raise RequestError(
        "continue_final_message needs a final message with content that the chat template shows as it is",
        param="continue_final_message", code="invalid_value",
    )  # fmt: skip


class ChatTemplate:
    """A compiled template, run in a sandbox. The environment is the one such templates are written for."""

    def __init__(self, source: str) -> None:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class GenerationBlock(Extension):
            """`{% generation %}` marks what the assistant said, for training; here it is only its content."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Any) -> Any:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        self.source = source
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        self._errors = jinja2.TemplateError
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as e:
            raise RequestError(
                f"the chat template is not valid: {_line(e)}", param="chat_template", code="invalid_chat_template"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], values: Mapping[str, Any]) -> str:
        """Raises RequestError with the template's reason."""
        try:
            return self._template.render(messages=messages, **values)
        except (self._errors, TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as e:
            raise RequestError(
                f"the chat template refuses these messages: {_line(e)}", param="messages", code="chat_template_error"
            ) from None


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """Raises ModelError if the model has no tokenizer or a damaged one."""
    folder = checkpoint.tokenizer_dir
    if folder is None:
        raise ModelError(
            f"{checkpoint.path}: no tokenizer files; add them, or use token ids only (serve and generate take "
            "--skip-tokenizer-init)"
        )
    config = _json(Path(folder) / "tokenizer_config.json")
    path = Path(folder) / "tokenizer.json"
    special = _special_tokens(config, _json(Path(folder) / "special_tokens_map.json"))
    if path.exists():
        from tokenizers import Tokenizer as Backend

        try:
            with opened(path) as file:
                backend = Backend.from_buffer(file.read())
        except Exception as e:  # the library raises a bare Exception for whatever is wrong with the file
            raise ModelError(f"{path}: can't be read as a tokenizer ({_line(e)}); get the file again") from None
    else:
        backend, special = _from_transformers(folder, special)
    backend.no_truncation()
    backend.no_padding()
    eos = (*_ids(checkpoint.generation_config.get("eos_token_id")), *_ids(checkpoint.config.get("eos_token_id")))
    return Tokenizer(
        backend, name=checkpoint.name, eos_ids=eos, special_tokens=special, chat_template=checkpoint.chat_template
    )


def _from_transformers(folder: str, special: dict[str, str]) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """tokenizer.model and other files, converted by transformers: seconds, hence only without a tokenizer.json."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ModelError(
            f"{folder}: no tokenizer.json, and what is there needs transformers: "
            'pip install "planaria[transformers]", or add the model\'s tokenizer.json'
        ) from None
    try:
        for path in Path(folder).iterdir():  # those that a library may open, and wait for
            if path.exists() and not path.is_dir():
                os.close(descriptor(path))
        slow = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        backend = slow.backend_tokenizer
    except Exception as e:  # whatever transformers, sentencepiece or a missing package raise
        raise ModelError(
            f"{folder}: no tokenizer.json, and transformers can't read the tokenizer ({_line(e)}); "
            "add the model's tokenizer.json"
        ) from None
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = getattr(slow, name, None)
        if value:
            special.setdefault(name, str(value))
    return backend, special


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[str, bool]:
    """How tokens become text, and whether a space at the very start is dropped.

    "byte_level": token characters stand for bytes. "sentencepiece": "▁" is a space and <0xNN> a byte. "other": ask
    the library.
    """
    if backend.decoder is None:
        return "other", False
    parts = json.loads(backend.decoder.__getstate__())
    steps = parts["decoders"] if parts.get("type") == "Sequence" else [parts]
    kinds = [s.get("type") for s in steps]
    if kinds == ["ByteLevel"]:
        return "byte_level", False
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and len(kinds) <= 4:
        space = steps[0].get("pattern") == {"String": "▁"} and steps[0].get("content") == " "
        strip = steps[3] if len(kinds) == 4 else None
        drops = strip == {"type": "Strip", "content": " ", "start": 1, "stop": 0}
        if space and (strip is None or drops):
            return "sentencepiece", drops
    return "other", False


def _bytes_of_characters() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, other bytes for U+0100 and up."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(plain)]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _bytes_of_characters()


def _clean(text: str) -> str:
    """JSON may carry half of a surrogate pair, which is no character: U+FFFD, as in any decoder."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own escapes HTML; prompts must not."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    out: dict[str, str] = {}
    for source in sources:
        for name, value in source.items():
            text = value.get("content") if isinstance(value, Mapping) else value
            if name.endswith("_token") and isinstance(text, str):
                out.setdefault(name, text)
    return out


def _ids(value: Any) -> tuple[int, ...]:
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(v for v in values if isinstance(v, int) and not isinstance(v, bool))


def _json(path: Path) -> dict[str, Any]:
    from planaria.checkpoint.folder import read_json

    return read_json(path) if path.exists() else {}


def _line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
