"""Named lists of problems of a merge. ``merge`` has what split keys, shared prefixes and rings of ranks leave."""

from __future__ import annotations

DEFAULT = ("attnmerge p4 t4096 h32 d128 bf16", "attnmerge p8 t64 h32 d128 bf16")
# One kernel serves every dtype, head dimension and tile: each a build.
BUILD = (
    *DEFAULT, "attnmerge p3 t1000 h5 d80 bf16", "attnmerge p2 t300 h6 d256 fp16", "attnmerge p32 t70 h3 d40 fp32",
)  # fmt: skip
SMALL = tuple(
    f"attnmerge {sizes} {dtype}"
    for sizes in (
        "p1 t1 h1 d1", "p2 t3 h2 d8", "p3 t70 h3 d40", "p2 t1 h5 d256", "p4 t5 h1 d7", "p5 t33 h1 d192", "p8 t2 h64 d16",
        "p9 t20 h4 d80", "p17 t9 h4 d64", "p2 t130 h2 d128", "p3 t300 h1 d24", "p65 t4 h2 d32",
    )
    for dtype in ("fp32", "bf16", "fp16")
)  # fmt: skip
# And latent attention's heads, and more tokens than a grid's second dimension has.
SWEEP = (*SMALL, "attnmerge p2 t3 h128 d512 bf16", "attnmerge p2 t66000 h2 d4 bf16")
MERGE = tuple(
    f"attnmerge p{parts} t{tokens} h{heads} d{width} bf16"
    for heads, width in ((32, 128), (64, 64))
    for parts, tokens in ((2, 64), (8, 64), (32, 64), (2, 4096), (4, 4096), (2, 32768))
)
SUITES = {"merge": MERGE}
