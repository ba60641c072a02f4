"""Planaria: an LLM inference engine that keeps serving when parts of it die."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "BeamSearchParams", "LoRARequest", "PoolingParams", "RequestOutput", "SamplingParams",
    "SharedWeights", "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "__version__",
]  # fmt: skip

if TYPE_CHECKING:
    from planaria.beam import BeamSearchParams
    from planaria.checkpoint.shared import SharedWeights
    from planaria.llm import LLM, AsyncLLM, RequestOutput
    from planaria.prompts import LoRARequest, TextPrompt, TokensPrompt
    from planaria.types import PoolingParams, SamplingParams, StructuredOutputsParams

_PLACES = {
    "LLM": "llm", "AsyncLLM": "llm", "RequestOutput": "llm", "SamplingParams": "types", "BeamSearchParams": "beam",
    "TextPrompt": "prompts", "TokensPrompt": "prompts", "StructuredOutputsParams": "types",
    "PoolingParams": "types", "LoRARequest": "prompts", "SharedWeights": "checkpoint.shared",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import the public classes on first use: `import planaria` must not import torch."""
    if name in _PLACES:
        from importlib import import_module

        return getattr(import_module(f"planaria.{_PLACES[name]}"), name)
    raise AttributeError(f"module 'planaria' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
