"""What a model is, in one vocabulary for all families. Made from a Hugging Face configuration by `planaria.models`."""

from __future__ import annotations

from typing import Any

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base and, for `kind` other than "default", the scaling's own parameters by their HF names."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3 | longrope
    params: dict[str, Any] = {}
    dim: int | None = None  # rotated dimensions of a head; None: all


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and switches of a decoder. Sizes in elements; `sliding_window` in tokens (None: full attention)."""

    architecture: str  # as in config.json, e.g. LlamaForCausalLM
    family: str  # planaria.models.<family>
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "bfloat16"  # of the checkpoint

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, in tokens (the query itself counts), or None."""
        return self.windows[layer] if self.windows else None

    @property
    def num_parameters(self) -> int:
        """Number of weights, biases and norms among them, the tied embedding counted once."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.hidden_size * (2 * q + 2 * kv + 3 * self.intermediate_size + 2)
        layer += self.attention_bias * (q + 2 * kv) + self.output_bias * self.hidden_size
        layer += self.mlp_bias * (2 * self.intermediate_size + self.hidden_size)
        layer += self.qk_norm * 2 * self.head_dim
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return layer * self.num_layers + tables + self.hidden_size
