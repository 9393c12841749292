"""The formats of experts' weights in checkpoints: bits of a weight, and what shares a scale. Knows nothing of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WeightFormat = Literal[
    "mxfp4", "fp8_block", "fp8_block_w8a8", "fp8_channel", "fp8_channel_w8a8", "fp8_channel_static",
    "int4_g32", "int4_g128", "int4_g32_zero", "int4_g128_zero",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Format:
    """A weight is its code's value times the scale of its block, ``block`` rows by columns of a matrix [out, in]; None is all.

    ``bits`` of a code, ``scale_bits`` of a scale; fp8 blocks have fp32 scales, or e8m0 ones, which take a quarter.
    ``zero_bits`` of a zero point, which is subtracted from a block's codes; 0 for none. ``w8a8``: a call quantises what weights
    are multiplied by: to e4m3 with an fp32 scale for 128 columns of a row, or, if ``static``, with a given scale for each
    product.
    """

    name: WeightFormat
    bits: int
    block: tuple[int, int | None]
    scale_bits: int
    zero_bits: int = 0
    w8a8: bool = False
    static: bool = False

    @property
    def in_blocks(self) -> bool:
        """Whether rows share a scale."""
        return self.block[0] > 1

    @property
    def in_channels(self) -> bool:
        """Whether a row has one scale, which it may share with others."""
        return self.block == (1, None)

    @property
    def group(self) -> int | None:
        """Columns of one row that share a scale, if a row has a whole number of such groups; else None."""
        return self.block[1] if self.block[0] == 1 else None

    def bytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix, scales and zero points included."""
        blocks = -(-rows // self.block[0]) * -(-columns // (self.block[1] or columns))
        return (rows * columns * self.bits + blocks * (self.scale_bits + self.zero_bits)) // 8


FORMATS: dict[str, Format] = {
    "mxfp4": Format("mxfp4", 4, (1, 32), 8),  # e2m1 and e8m0, of OCP's Microscaling Formats 1.0
    "fp8_block": Format("fp8_block", 8, (128, 128), 32),  # e4m3, as DeepSeek-V3's
    "fp8_block_w8a8": Format("fp8_block_w8a8", 8, (128, 128), 32, w8a8=True),  # the same, as DeepSeek-V3 computes with them
    "fp8_channel": Format("fp8_channel", 8, (1, None), 32),  # e4m3, as compressed-tensors' of channels
    "fp8_channel_w8a8": Format("fp8_channel_w8a8", 8, (1, None), 32, w8a8=True),
    "fp8_channel_static": Format("fp8_channel_static", 8, (1, None), 32, w8a8=True, static=True),  # as ModelOpt's of matrices
    # Integers from -8 to 7 with a 16-bit scale for 32 or 128, as in compressed-tensors.
    "int4_g32": Format("int4_g32", 4, (1, 32), 16),
    "int4_g128": Format("int4_g128", 4, (1, 128), 16),
    # From 0 to 15, minus a zero point, also of 4 bits.
    "int4_g32_zero": Format("int4_g32_zero", 4, (1, 32), 16, 4),
    "int4_g128_zero": Format("int4_g128_zero", 4, (1, 128), 16, 4),
}
