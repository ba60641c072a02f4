"""What a model is, in one vocabulary for all families. Made from a Hugging Face configuration by this package."""

from __future__ import annotations

from typing import Any

import msgspec


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: base and, for `kind` other than "default", the scaling's own parameters by their HF names."""

    theta: float = 10000.0
    kind: str = "default"  # default | linear | dynamic | yarn | llama3 | longrope | none (nothing is turned)
    params: dict[str, Any] = {}
    dim: int | None = None  # rotated dimensions of a head; None: all


class MLAConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention: keys and values of all heads are made from one latent vector a token.

    Sizes in elements. A query's or key's head is `qk_nope_head_dim` columns without position, then `qk_rope_head_dim`
    rotated ones, which in keys are the same for all heads.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries are made from the hidden state at once
    interleaved: bool = True  # rotated pairs are neighbours in the checkpoint, not half a head apart

    @property
    def width(self) -> int:
        """What is cached for a token in a layer: the latent and the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def num_parameters(self, hidden: int, heads: int) -> int:
        """Weights of one layer's attention, norms among them, biases not."""
        queries = heads * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        rank = self.q_lora_rank
        q = hidden * queries if rank is None else hidden * rank + rank + rank * queries
        up = heads * (self.qk_nope_head_dim + self.v_head_dim)
        return q + hidden * self.width + self.kv_lora_rank * (1 + up) + heads * self.v_head_dim * hidden


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of experts: how a token chooses among them, and what its layers are made of.

    Scores are `scoring` of the router's logits over all experts, in float32. With `num_groups` > 1 only experts of the
    `top_groups` best groups can be chosen; a group is worth its best expert ("max") or the sum of its best two
    ("sum2"). With `correction_bias` a number per expert is added for choosing, not for weighting. The weights of the
    chosen are their scores, divided by their sum if `renormalize`, times `scaling`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int  # of one expert
    scoring: str = "softmax"  # softmax | sigmoid
    renormalize: bool = False
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = "max"  # max | sum2
    correction_bias: bool = False
    shared_intermediate_size: int = 0  # of the shared experts together; 0: none
    shared_gate: bool = False  # the shared experts' output times the sigmoid of a gate
    dense_layers: tuple[int, ...] = ()  # these have a plain MLP
    biases: bool = False  # of the experts, and of the router
    router: str = "gate"
    block: str = "mlp"  # how tensors are named: model.layers.N.<block>.experts.E.<gate, up, down>.weight
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # or gate and up in one, rows in turn, and down
    shared_name: str = "shared_expert"


class AttendingLayer(msgspec.Struct, frozen=True):
    """module: which of the model's attends. heads, width: of what it caches of a token, keys and values each. window:
    keys that a token sees, which end with its own; 0: all up to that; None: others, or keys and values differ in width.
    """

    module: str
    heads: int
    width: int
    window: int | None = None


class Foreign(msgspec.Struct, frozen=True, kw_only=True):
    """A model that Transformers' own code computes (docs/adr/0054). parameters: how many it has. tensor_ranks: what
    their number must divide; why_not: of a model that can't be cut."""

    layers: tuple[AttendingLayer, ...]
    parameters: int
    tensor_ranks: int = 1
    why_not: str = ""


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Shapes and switches of a decoder. Sizes in elements; `sliding_window` in tokens (None: full attention)."""

    architecture: str  # as in config.json, e.g. LlamaForCausalLM
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
    local_rope: RopeConfig | None = None  # of layers with a window; None: the same
    without_positions: tuple[int, ...] = ()  # layers that turn no query and no key
    activation: str = "silu"  # see `Operations.gated`
    mlp_names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")  # two: no gate
    layer_norms: bool = False  # with means and biases, in place of RMS norms
    norm_offset: float = 0.0  # added to weights of norms
    branch_norms: bool = False  # what a block adds to the residual is normalised too: four norms a layer
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    score_cap: float = 0.0  # scores are cap * tanh(score / cap); 0: as they are
    logit_cap: float = 0.0
    logit_scale: float = 1.0
    qkv_clip: float = 0.0  # q, k and v are kept within it; 0: as they are
    sinks: bool = False  # each head has one key more, without a value
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # on q, k, v
    output_bias: bool = False  # on o
    mlp_bias: bool = False
    qk_norm: bool = False
    mla: MLAConfig | None = None  # None: q, k and v of each head
    absent_norms: tuple[str, ...] = ()  # by name: where one would be, numbers stay as they are
    wide_qk_norm: bool = False  # q and k are normalised over all heads together, not each head for itself
    windows: tuple[int | None, ...] = ()  # per layer; empty: full attention everywhere
    eos_ids: tuple[int, ...] = ()
    dtype: str = "bfloat16"  # of the checkpoint
    moe: MoEConfig | None = None  # None: every layer has a plain MLP
    head: str = "vocabulary"  # what the last hidden states become: logits; "labels": scores of so many; "": nothing
    num_labels: int = 0
    foreign: Foreign | None = None  # None: this package's code computes it

    def is_moe(self, layer: int) -> bool:
        """Has this layer experts in place of an MLP?"""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """Layers with experts, in order."""
        return tuple(filter(self.is_moe, range(self.num_layers)))

    @property
    def has_logits(self) -> bool:
        """Can it draw tokens?"""
        return self.head == "vocabulary"

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, in tokens (the query itself counts), or None."""
        return self.windows[layer] if self.windows else None

    def rope_of(self, layer: int) -> int:
        """Which rotary embedding a layer has: 0 the model's, 1 that of windows, 2 none."""
        return 2 if layer in self.without_positions else int(self.window(layer) is not None)

    @property
    def num_parameters(self) -> int:
        """Number of weights, biases and norms among them, the tied embedding counted once."""
        if self.foreign is not None:
            return self.foreign.parameters
        norm = self.hidden_size * (1 + self.layer_norms)
        layer = self._attention_parameters() + (4 if self.branch_norms else 2) * norm
        tables = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings or not self.has_logits else 2)
        tables += self.num_labels * self.hidden_size
        blocks = sum(self._block_parameters(i) for i in range(self.num_layers))
        return layer * self.num_layers + blocks + tables + norm

    def _attention_parameters(self) -> int:
        """Of one layer."""
        hidden, output_bias = self.hidden_size, self.output_bias * self.hidden_size
        if self.mla is not None:
            biases = self.attention_bias * ((self.mla.q_lora_rank or 0) + self.mla.width)
            return self.mla.num_parameters(hidden, self.num_heads) + biases + output_bias
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norms = self.qk_norm * 2 * self.head_dim + self.wide_qk_norm * (q + kv) + self.sinks * self.num_heads
        return hidden * (2 * q + 2 * kv) + self.attention_bias * (q + 2 * kv) + output_bias + norms

    def _block_parameters(self, layer: int) -> int:
        """Of a layer's MLP or experts."""
        if self.moe is None or not self.is_moe(layer):
            first = len(self.mlp_names) - 1
            biases = first * self.intermediate_size + self.hidden_size
            return (first + 1) * self.hidden_size * self.intermediate_size + self.mlp_bias * biases
        moe = self.moe
        columns = moe.num_experts * moe.intermediate_size + moe.shared_intermediate_size
        router = moe.num_experts * (self.hidden_size + moe.correction_bias)
        if moe.biases:
            router += moe.num_experts * (1 + 2 * moe.intermediate_size + self.hidden_size)
        return 3 * self.hidden_size * columns + router + moe.shared_gate * self.hidden_size
