"""Finding a model and reading all of it but its weights: configuration, tokenizer files, chat template, tensor index.

No torch here: the server process uses this package. Weights are read by `planaria.loader`.
"""

from planaria.checkpoint.resolve import resolve_checkpoint
from planaria.checkpoint.spec import Checkpoint, TensorInfo

__all__ = ["Checkpoint", "TensorInfo", "resolve_checkpoint"]
