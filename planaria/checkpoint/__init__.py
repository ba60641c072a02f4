"""Finding a model and reading all of it but its weights: configuration, tokenizer files, chat template, tensor index.

No torch here: the server process uses this package. Weights are read by `planaria.loader`.
"""

from planaria.checkpoint.resolve import Checkpoint, resolve_checkpoint

__all__ = ["Checkpoint", "resolve_checkpoint"]
