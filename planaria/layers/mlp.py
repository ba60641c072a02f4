"""The block after attention that has no experts, or beside them what all tokens share."""

from __future__ import annotations

from planaria.kernels.ops import Act, Operations, Weight
from planaria.layers.norms import RMSNorm, into
from planaria.layers.weights import TensorPart, WeightLoader


class MLP:
    """down(gated(gate x, up x)), gate and up fused, into the residual; what comes before `down` times the sigmoid of
    `scale` x where that names a weight. columns: this rank's, of `size`. leads: its bias of `down` counts. names: of
    gate, up and down, or of two, with a plain GELU between them."""

    def __init__(
        self, load: WeightLoader, name: str, width: int, size: int, columns: range, *, bias: bool = False,
        leads: bool = True, scale: str = "", kind: str = "silu",
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), after: RMSNorm | None = None,
    ) -> None:  # fmt: skip
        first = [TensorPart(f"{name}.{part}", size, columns) for part in names[:-1]]
        down = TensorPart(f"{name}.{names[-1]}", width, range(width))
        self.plain, self.kind, self.after = len(first) == 1, kind, after
        self.gate_up: Weight = load.linear(first, range(width), width, bias=bias)
        self.down: Weight = load.linear([down], columns, size, bias=bias and leads)
        self.scale = load.plain(scale, 1, width) if scale else None

    def __call__(self, ops: Operations, x: Act, h: Act) -> Act:
        inner = ops.linear(x, self.gate_up)
        inner = ops.gelu(inner) if self.plain else ops.gated(inner, self.kind)
        if self.scale is not None:
            inner = ops.gate_rows(inner, ops.scores(x, self.scale))
        return into(ops, inner, self.down, h, self.after)
