"""Which instructions the kernels are written for, and the tile sizes that follow. Pure values; hashable."""

from __future__ import annotations

from dataclasses import dataclass

ISAS = ("amx", "avx512_bf16", "avx512", "generic")


@dataclass(frozen=True)
class Target:
    """One flavour of the kernels: activation dtype and instruction level.

    amx: products of tiles of bfloat16 in hardware (amx.py); all else is as avx512_bf16. avx512_bf16: dot products of
    bfloat16 pairs in hardware. avx512: float32 arithmetic on 32 wide registers. generic: the same in plain vector IR,
    which LLVM lowers to whatever the CPU has (AVX2, NEON).
    """

    dtype: str  # bfloat16 | float32
    isa: str

    @property
    def item(self) -> int:
        """Bytes of an activation element."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def pair(self) -> int:
        """Elements along K in one step of a dot product: one broadcast of 4 bytes, one 64-byte load of weights."""
        return 4 // self.item

    @property
    def native(self) -> bool:
        return self.dtype == "bfloat16" and self.isa in ("amx", "avx512_bf16")

    @property
    def tiled(self) -> bool:
        """Whether dense products, keys and values are multiplied by AMX."""
        return self.dtype == "bfloat16" and self.isa == "amx"

    @property
    def widens(self) -> bool:
        """Whether a product's rows are widened to float32 before their tiles. Weights never are, outside registers."""
        return self.dtype == "bfloat16" and not self.wide

    @property
    def row_item(self) -> int:
        """Bytes of an element of a product's rows, as its tiles take them."""
        return 4 if self.widens else self.item

    @property
    def wide(self) -> bool:
        return self.isa != "generic"

    # largest tiles: rows x vectors of 16 columns
    @property
    def tile_rows(self) -> int:
        """As many as the registers hold beside a step of weights, which in bfloat16 is widened there."""
        if self.wide:
            return 16 if self.tiled else 8
        return 5 if self.widens else 6

    @property
    def tile_panels(self) -> int:
        return 3 if self.wide else 1

    @property
    def value_rows(self) -> int:
        return 16 if self.tiled else 6 if self.wide else 4

    @property
    def value_panels(self) -> int:
        return 2 if self.tiled else 4 if self.wide else 1

    # of keys summed up as values: a step is one column, or two
    @property
    def latent_rows(self) -> int:
        return 6 if self.wide else 2

    @property
    def latent_steps(self) -> int:
        return (4 if self.wide else 2) // self.pair
