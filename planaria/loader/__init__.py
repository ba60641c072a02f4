"""Reading weights: mapped files in, tensors and packed weights out, under Hugging Face's names for every format."""

from planaria.loader.quant import PACKED_KINDS, dequantise, quantise
from planaria.loader.source import WeightSource, open_weights

__all__ = ["PACKED_KINDS", "WeightSource", "dequantise", "open_weights", "quantise"]
