"""What `LLM.get_tokenizer()` gives: this package's tokenizer under the words that scripts for vLLM know, those of
Hugging Face's. A page of names; no rule beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planaria.server.tokenise import Tokenizer


class Encoded(dict[str, Any]):
    """`input_ids` and `attention_mask`, as entries and as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


class TokenizerWords:
    """For what is not here, `transformers.AutoTokenizer` reads the same files."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.inner, self.backend = tokenizer, tokenizer.backend
        self.name_or_path, self.chat_template = tokenizer.name, tokenizer.chat_template
        self.vocab_size, self.special_tokens_map = tokenizer.vocab_size, tokenizer.special_tokens
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (
            tokenizer.special_tokens.get(f"{kind}_token") for kind in ("bos", "eos", "pad", "unk")
        )
        self.bos_token_id, self.eos_token_id, self.pad_token_id, self.unk_token_id = (
            None if text is None else self.backend.token_to_id(text)
            for text in (self.bos_token, self.eos_token, self.pad_token, self.unk_token)
        )
        self.all_special_ids = sorted(tokenizer.special_ids)
        self.all_special_tokens = [self.backend.id_to_token(id) for id in self.all_special_ids]

    def __len__(self) -> int:
        return self.vocab_size

    def __call__(self, text: str | list[str], *, add_special_tokens: bool = True) -> Encoded:
        """Of several texts, a list of each."""
        if isinstance(text, str):
            ids = self.inner.encode(text, add_special_tokens)
            return Encoded(input_ids=ids, attention_mask=[1] * len(ids))
        several = self.inner.encode_batch(text, add_special_tokens)
        return Encoded(input_ids=several, attention_mask=[[1] * len(ids) for ids in several])

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self.inner.encode(text, add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self.inner.decode(ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def tokenize(self, text: str) -> list[str]:
        tokens: list[str] = self.inner.backend.encode(text, add_special_tokens=False).tokens
        return tokens

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        return self.backend.id_to_token(ids) if isinstance(ids, int) else [self.backend.id_to_token(id) for id in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        if isinstance(tokens, str):
            return self.backend.token_to_id(tokens)
        return [self.backend.token_to_id(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend.get_vocab()
        return vocabulary

    def apply_chat_template(
        self, conversation: list[dict[str, Any]], *, tokenize: bool = True, add_generation_prompt: bool = False,
        **more: Any,
    ) -> str | list[int]:  # fmt: skip
        """more: tools, chat_template, continue_final_message, and variables of the template."""
        text = self.inner.apply_chat_template(conversation, add_generation_prompt, **more)
        return self.inner.encode(text, False) if tokenize else text
