"""The block after attention that has no experts, or beside them what all tokens share."""

from __future__ import annotations

from planaria.kernels.ops import Act, Operations, Weight
from planaria.layers.weights import TensorPart, WeightLoader


class MLP:
    """down(silu(gate x) * up x), gate and up fused, into the residual; what comes before `down` times the sigmoid of
    `scale` x where that names a weight. columns: this rank's, of `size`. leads: its bias of `down` counts."""

    def __init__(
        self, load: WeightLoader, name: str, width: int, size: int, columns: range, *, bias: bool = False,
        leads: bool = True, scale: str = "",
    ) -> None:  # fmt: skip
        gate, up = (TensorPart(f"{name}.{part}_proj", size, columns) for part in ("gate", "up"))
        down = TensorPart(f"{name}.down_proj", width, range(width))
        self.gate_up: Weight = load.linear([gate, up], range(width), width, bias=bias)
        self.down: Weight = load.linear([down], columns, size, bias=bias and leads)
        self.scale = load.plain(scale, 1, width) if scale else None

    def __call__(self, ops: Operations, x: Act, h: Act) -> Act:
        inner = ops.silu_mul(ops.linear(x, self.gate_up))
        if self.scale is not None:
            inner = ops.gate_rows(inner, ops.scores(x, self.scale))
        return ops.linear(inner, self.down, h, reduce=True)
