"""The README's picture: how fast ours is beside the best peer, case by case, as an SVG of plain shapes and text.

It brings a background of its own, so that it is read on a white and on a dark page.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from html import escape

from numbers_from_records import Case

from flashmoe_science.hardware.gpus import GPUS

PAPER, INK, DIM, OURS, PEER = "#ffffff", "#1b1b1a", "#5f5e59", "#2a78d6", "#b9b8b1"
WIDTH, LEFT, LONGEST = 740, 290, 282  # pixels: in all, of the names, and of the longest bar
TOP, ROW, GAP = 44, 34, 30  # of the title, of a case, and above a GPU's first
STYLE = (
    f"text{{font:13px system-ui,sans-serif;fill:{INK}}}.head{{font-weight:600;font-size:15px}}.dim{{font-size:11px;fill:{DIM}}}"
)
DRAWN = "drawn at random"  # cases of which one stands for all
PEERS = {
    "fa3": "FA3",
    "fa4": "FA4",
    "fa4_bwd": "FA4",
    "fa4_bwd_deterministic": "FA4 with equal bits",
    "sdpa_bwd_cudnn": "cuDNN",
    "sdpa_cudnn": "cuDNN",
    "sdpa_flash": "FA2",
    "sdpa": "PyTorch",
    "sdpa_bwd": "PyTorch",
    "flashinfer_fa2": "FlashInfer",
    "flashinfer_xqa": "FlashInfer",
    "grouped_mm": "PyTorch",
    "grouped_mm_train": "PyTorch",
    "sonicmoe_train": "SonicMoE",
    "batched_mm": "PyTorch",
    "sonicmoe": "SonicMoE",
    "humming": "humming",
    "dequantised_at_load": "bf16 at load",
}


def picture(cases: Sequence[Case]) -> str:
    """The picture of these cases, without those that are drawn at random but the first, by GPU."""
    shown = [case for case in cases if not case.title.endswith(DRAWN)]
    unit = LONGEST / max((1.0, *(case.mean.ratio for case in shown)))  # pixels of a ratio of 1
    parts, y, gpu = [_text(16, 26, "Speed beside the fastest peer (longer is faster)", "head"), *_legend()], TOP, ""
    for case in shown:
        if case.gpu != gpu:
            gpu, y = case.gpu, y + GAP
            parts.append(_text(16, y - 8, GPUS[gpu].product, "head"))
        parts += _bars(case, y, unit)
        y += ROW
    parts.append(
        f'<line x1="{LEFT + unit:.1f}" x2="{LEFT + unit:.1f}" y1="{TOP + 6}" y2="{y}" stroke="{DIM}" stroke-dasharray="3 3"/>'
    )
    size = f'viewBox="0 0 {WIDTH} {y + 12}" width="{WIDTH}" height="{y + 12}"'
    told = "; ".join(f"{case.title} on {case.gpu}: {case.mean.ratio:.2f}" for case in shown)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>Our speed over the fastest peer's, geometric mean: {escape(told)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect width="100%" height="100%" rx="8" fill="{PAPER}"/>',
            *parts,
            "</svg>\n",
        ]
    )


def _bars(case: Case, y: int, unit: float) -> Iterator[str]:
    """Ours above the best peer, with the mean, and the least ratio among the problems."""
    rivals = Counter(PEERS.get(row.rival or "", row.rival or "") for row in case.rows)
    peers = ", ".join(f"{name} ({count})" for name, count in rivals.most_common())
    least = min(row.ratio for row in case.rows if row.ratio is not None)
    ours = case.mean.ratio * unit
    yield _text(LEFT - 10, y + 11, case.title, end=True)
    yield _text(LEFT - 10, y + 24, peers, "dim", end=True)
    yield f'<rect x="{LEFT}" y="{y}" width="{ours:.1f}" height="14" fill="{OURS}"/>'
    yield f'<rect x="{LEFT}" y="{y + 15}" width="{unit:.1f}" height="8" fill="{PEER}"/>'
    yield _text(LEFT + max(ours, unit) + 8, y + 12, f"{case.mean.ratio:.2f}x")
    yield _text(LEFT + max(ours, unit) + 52, y + 12, f"worst {least:.2f}x of {len(case.rows)}", "dim")


def _legend() -> Iterator[str]:
    for x, colour, words in ((WIDTH - 290, OURS, "ours"), (WIDTH - 220, PEER, "the fastest peer of each problem")):
        yield f'<rect x="{x}" y="16" width="12" height="12" fill="{colour}"/>'
        yield _text(x + 17, 26, words, "dim")


def _text(x: float, y: float, words: str, style: str = "", end: bool = False) -> str:
    attributes = f' class="{style}"' * bool(style) + ' text-anchor="end"' * end
    return f'<text x="{x:.0f}" y="{y:.0f}"{attributes}>{escape(words)}</text>'
