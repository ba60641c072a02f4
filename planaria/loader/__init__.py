"""Reading weights: mapped files in, tensors and packed weights out, under Hugging Face's names for every format."""

from planaria.loader.source import WeightSource

__all__ = ["WeightSource"]
