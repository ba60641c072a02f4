"""Planaria: an LLM inference engine that keeps serving when parts of it die."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "__version__"]

if TYPE_CHECKING:
    from planaria.llm import LLM, AsyncLLM, RequestOutput
    from planaria.types import SamplingParams


def __getattr__(name: str) -> Any:
    """Import the public classes on first use: `import planaria` must not import torch."""
    if name in ("LLM", "AsyncLLM", "RequestOutput"):
        from planaria import llm

        return getattr(llm, name)
    if name == "SamplingParams":
        from planaria.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'planaria' has no attribute {name!r}")
