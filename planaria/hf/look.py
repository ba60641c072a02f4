"""What Transformers makes of a config.json, without its weights: the model is made where no memory is and run once, and
what its attention is asked for is written down. A program, so that no server imports torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from planaria.errors import ModelError
from planaria.hf.attention import NAME, Mask, check, register
from planaria.hf.cut import cut, most_ranks, plan_of

TOKENS = 8  # of the run
LONG = 1 << 17  # positions of a text, where nobody says how many it may have
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}  # of `layer_types`
OWN_WAYS = "its layers attend in ways of their own, not by Transformers' attention interface"
CHANGING = ("dynamic", "longrope")  # rotary embeddings that look at the longest text of a step


class AttentionLog:
    """In place of every layer's attention."""

    def __init__(self, longest: int) -> None:
        self.longest = longest  # positions of a text
        self.calls: list[tuple[Any, int, int, int | None]] = []  # module, and of an AttendingLayer what follows
        self.heads = 0

    def __call__(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: object, **given: Any) -> Tensor:
        for name in ("scaling", "softcap", "s_aux"):
            given.pop(name, None)
        check(mask, given)
        assert isinstance(mask, Mask)
        if not mask.causal():
            raise ModelError("its tokens see later ones")
        if key.shape[2] != query.shape[2]:
            raise ModelError("its layers attend to more than the step's own tokens")
        self.heads = max(self.heads, query.shape[1])
        window = mask.window(self.longest) if key.shape[-1] == value.shape[-1] else None
        self.calls.append((module, key.shape[1], max(key.shape[-1], value.shape[-1]), window))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])


def configured(fields: dict[str, Any]) -> Any:
    """Transformers' configuration. Raises ModelError."""
    if fields.get("auto_map"):
        fields = {name: value for name, value in fields.items() if name != "auto_map"}
    kind = fields.get("model_type")
    try:
        return AutoConfig.for_model(**fields)
    except Exception as e:
        raise ModelError(f"Transformers has no configuration of model_type {kind!r}: {_line(e)}") from None


def made(config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model, where its tensors take no memory. Raises ModelError."""
    register()
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("an encoder and a decoder: only decoders are run")
    try:
        with torch.device("meta"):
            made_by: Any = AutoModelForCausalLM
            return made_by.from_config(config, attn_implementation=NAME, dtype=dtype)
    except KeyError as e:
        rule = OWN_WAYS if e.args == (NAME,) else f"Transformers makes no causal model of it: {_line(e)}"
        raise ModelError(rule) from None
    except Exception as e:
        raise ModelError(f"Transformers makes no causal model of it: {_line(e)}") from None


def look(fields: dict[str, Any]) -> dict[str, Any]:
    """What planaria.checkpoint.foreign.Found has. Raises ModelError."""
    config = configured(fields)
    model = made(config)
    named, got = fields.get("architectures") or [], type(model).__name__
    if named and got not in named:
        raise ModelError(f"Transformers makes a {got} of it")
    if getattr(model, "_is_stateful", False):
        raise ModelError("its layers keep state other than keys and values")
    text = config.get_text_config()
    kinds = {str(value) for name, value in _ropes(text.to_dict()) if name in ("rope_type", "type")}
    if found := kinds & set(CHANGING):
        raise ModelError(f"its rotary embedding ({', '.join(found)}) changes with the longest text of a step")
    if others := set(getattr(text, "layer_types", None) or ()) - ATTENTION:
        raise ModelError(f"its layers ({', '.join(sorted(others))}) keep state other than keys and values")
    recorder, parameters = _run(model), sum(parameter.numel() for parameter in model.parameters())
    layers, attending = text.num_hidden_layers, len({id(call[0]) for call in recorder.calls})
    if not len(recorder.calls) == attending == layers:
        raise ModelError(
            f"of its {layers} layers {attending} attend by Transformers' interface, {len(recorder.calls)} times: the "
            "others keep state other than keys and values, or attend in ways of their own"
        )
    if missing := {"position_ids", "logits_to_keep"} - set(signature(model.forward).parameters):
        raise ModelError(f"its forward pass takes no {', '.join(sorted(missing))}")
    ranks, why = _ranks(model, recorder)
    names = {id(module): name for name, module in model.named_modules()}
    return {
        "foreign": {
            "layers": [
                {"module": names[id(module)], "heads": heads, "width": width, "window": window}
                for module, heads, width, window in recorder.calls
            ],
            "parameters": parameters,
            "tensor_ranks": ranks,
            "why_not": why,
        },
        "num_heads": recorder.heads,
        "hidden_size": text.hidden_size,
        "vocab_size": model.get_output_embeddings().weight.shape[0],
        "max_position": getattr(text, "max_position_embeddings", None),
    }


def _ranks(model: Any, log: AttentionLog) -> tuple[int, str]:
    """What a number of tensor ranks must divide, and if that is 1 why. The model is cut so, and run."""
    try:
        plan = plan_of(model)
        if (ranks := most_ranks(model, plan, [log.heads, *(call[1] for call in log.calls)])) > 1:
            cut(model, plan, 0, ranks, lambda x: x)
            _run(model)
    except ModelError as e:
        return 1, str(e)
    return ranks, "" if ranks > 1 else "its heads and columns have no common divisor"


def _run(model: Any) -> AttentionLog:
    recorder = AttentionLog(getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONG)
    for module in model.modules():
        module.paged = lambda *given, own=module, **more: recorder(own, *given, **more)
    tokens = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    try:
        with torch.inference_mode():
            model(input_ids=tokens, position_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False)
    except ModelError:
        raise
    except Exception as e:
        if Mask.__name__ in str(e):
            raise ModelError(f"{OWN_WAYS}: its mask is more than which token sees which") from None
        raise ModelError(f"it can't be run on a row of tokens of several texts: {_line(e)}") from None
    return recorder


def _ropes(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _ropes(each, str(key))
    else:
        yield name, value


def _line(e: Exception) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[0][:300]


def answer(asked: bytes) -> str:
    """To a config.json: what `look` gives, or {"refused": why}."""
    try:
        return json.dumps(look(json.loads(asked)))
    except ModelError as e:
        return json.dumps({"refused": str(e)})


if __name__ == "__main__":
    print(answer(sys.stdin.buffer.read()))
