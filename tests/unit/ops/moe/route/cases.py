"""The cases that every implementation of the router must pass, and an independent fp64 reference.

Run as a script with TRITON_INTERPRET=1 it puts them to the kernel in Triton's interpreter, which needs a process of its own,
and prints one JSON object: the reasons to refuse each case's result, by its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from flashmoe_science.ops.moe.route.spec import Options, Tensors

Route = Callable[[torch.Tensor, torch.Tensor | None, Options], tuple[torch.Tensor, torch.Tensor]]
INF, NAN = math.inf, math.nan


@dataclass(frozen=True)
class Case:
    """A routing, and in what its logits and its tensors are unusual."""

    experts: int
    spec: Options
    dtype: torch.dtype = torch.float32
    tokens: int = 3
    values: str = "normal"  # one of VALUES
    bias: str = ""  # one of BIASES
    memory: str = "dense"  # dense | rows (of a wider tensor; so the bias) | columns (transposed) | broadcast (row stride 0)

    def __str__(self) -> str:
        spec, dtype = self.spec, str(self.dtype).removeprefix("torch.")
        words = [f"t{self.tokens} e{self.experts} k{spec.top_k} {spec.scoring} {dtype}", self.values, self.bias, self.memory]
        words += [f"g{spec.groups} of {spec.top_k_groups}" if spec.groups > 1 else "", spec.normalize]
        return " ".join(
            word for word in (*words, f"x{spec.scaling_factor}") if word not in ("", "normal", "dense", "none", "x1.0")
        )


def _some(values: list[float]) -> Callable[[torch.Tensor], torch.Tensor]:
    """Replaces a third of the logits by the values in turn, and all of the last row."""

    def put(x: torch.Tensor) -> torch.Tensor:
        turns = torch.tensor(values)[torch.arange(x.numel()) % len(values)].view_as(x)
        x = torch.where(torch.arange(x.numel()).view_as(x) % 3 == 0, turns, x)
        x[-1] = turns[-1]
        return x

    return put


VALUES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal": lambda x: x,
    "equal": lambda x: torch.full_like(x, 0.25),
    "ties": lambda x: (2 * x).round(),
    "zeros": lambda x: torch.where(x < 0, -0.0, 0.0),
    "last bit": lambda x: (torch.full_like(x, 8.0).view(torch.int32) + (1000 * x).int() % 3).view(torch.float32),
    "last bit, negative": lambda x: (torch.full_like(x, -8.0).view(torch.int32) + (1000 * x).int() % 3).view(torch.float32),
    "large": lambda x: 100 * x,
    "huge": lambda x: 1e38 * x,
    "tiny": lambda x: 1e-40 * x,
    "-inf": _some([-INF]),
    "inf": _some([INF]),
    "nan": _some([NAN, -NAN]),
    "nan and inf": _some([NAN, -INF, INF, -0.0]),
    "mostly -inf": lambda x: torch.where(torch.arange(x.shape[1]) % 29 == 3, x, -INF),
    "mostly nan": lambda x: torch.where(torch.arange(x.shape[1]) % 29 == 3, x, NAN),
    "saturated": lambda x: 40 + x,  # a sigmoid of 1 in fp32
}
BIASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bias": lambda b: b,
    "bias of -inf": lambda b: torch.where(torch.arange(b.numel()) % 3 == 0, -INF, b),
    "one bias": lambda b: torch.where(torch.arange(b.numel()) == b.numel() - 1, 8.0, 0.0),
}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SCORINGS = ("softmax", "softmax_topk", "sigmoid")
MOST_CHOICES = 384


def _sizes() -> list[Case]:
    """Each number of experts and of choices with each scoring; the rest in turn. The interpreter takes a choice at a time."""
    cases = []
    for experts in (1, 7, 60, 128, 384, 2048):
        for top_k in sorted({1, min(8, experts), min(experts, MOST_CHOICES)}):
            for place, scoring in enumerate(_SCORINGS if top_k < MOST_CHOICES else _SCORINGS[:1]):
                turn = len(cases) % 5
                spec = Options(top_k, scoring, ("none", "sum")[turn % 2], scaling_factor=(1.0, 2.5, 1.0)[turn % 3])
                tokens = 1 if top_k > 50 else 3 if experts > 128 else 17 if turn else 9
                cases.append(Case(experts, spec, _DTYPES[(place + turn) % 3], tokens=tokens))
    return cases


def _grouped(experts: int, groups: int, kept: int, top_k: int, **rest: object) -> Case:
    spec = Options(top_k, "sigmoid", "sum", groups, kept, 2.5)
    return Case(experts, spec, **rest)  # type: ignore[arg-type]


SIZES = (*_sizes(), Case(512, Options(10, normalize="sum"), torch.bfloat16))
ODD = tuple(Case(60, Options(8, scoring, "sum"), values=values) for values in VALUES for scoring in _SCORINGS)
BIASED = (
    *(Case(60, Options(8, "sigmoid", "sum"), values=values, bias="bias") for values in VALUES if values != "saturated"),
    Case(384, Options(8, "sigmoid", "sum", scaling_factor=2.827), bias="bias"),
    Case(128, Options(128, "sigmoid"), torch.bfloat16, tokens=2, bias="bias"),
    Case(60, Options(50, "sigmoid"), bias="bias of -inf"),
    Case(7, Options(1, "sigmoid"), bias="one bias"),
)
GROUPED = (
    *(_grouped(256, 8, 4, 8, values=values, bias=bias) for values in ("normal", "ties", "equal") for bias in ("", "bias")),
    *(_grouped(64, 8, 1, 8, values=values) for values in ("equal", "nan", "nan and inf", "-inf", "mostly nan")),
    _grouped(256, 8, 4, 128, dtype=torch.bfloat16, tokens=2, bias="bias"),
    _grouped(8, 8, 3, 3),  # groups of one
    _grouped(8, 8, 8, 8, values="ties"),
    _grouped(64, 2, 1, 5, bias="bias of -inf"),
    _grouped(32, 4, 2, 4, tokens=33),
)
MEMORY = (
    *(Case(60, Options(8), memory=memory) for memory in ("rows", "columns", "broadcast")),
    Case(128, Options(8), torch.bfloat16, memory="rows"),
    Case(32, Options(8, "sigmoid"), bias="bias", memory="rows"),
    Case(1, Options(1), memory="columns"),
    Case(128, Options(8), tokens=0),
    Case(1, Options(1), tokens=1),
)
CASES = (*SIZES, *ODD, *BIASED, *GROUPED, *MEMORY)
# The interpreter takes as long for 128 choices as for ten of the other cases.
INTERPRETED = tuple(case for case in CASES if case.spec.top_k <= 60 or case.experts == MOST_CHOICES)
# The kernel leaves these to PyTorch's operators.
NOT_FOR_KERNEL = (
    _grouped(60, 6, 2, 8, bias="bias"),
    _grouped(60, 4, 2, 8, values="ties"),
    _grouped(96, 3, 3, 8, values="nan"),
    Case(5000, Options(8)),
)


def tensors_of(case: Case, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [tokens, experts] and the bias, the same on any device."""
    generator = torch.Generator().manual_seed(case.experts + case.spec.top_k)
    x = torch.randn(case.tokens, case.experts, generator=generator)
    bias = BIASES[case.bias](torch.randn(case.experts, generator=generator) / 4) if case.bias else None
    x = (VALUES[case.values](x) if case.tokens else x).to(case.dtype)
    wide = x.new_full((case.tokens, case.experts + 5), NAN).to(device)
    wide[:, : case.experts] = x
    x = x.to(device)
    if bias is not None and case.memory == "rows":
        bias = torch.stack([bias, torch.full_like(bias, NAN)], 1).to(device)[:, 0]
    laid_out = {"rows": wide[:, : case.experts], "columns": x.T.contiguous().T, "broadcast": x[:1].expand_as(x)}
    return laid_out.get(case.memory, x), None if bias is None else bias.to(device)


def reference(logits: torch.Tensor, bias: torch.Tensor | None, spec: Options) -> tuple[torch.Tensor, list[list[int]]]:
    """The weights in fp64 and the ids of logits [tokens, experts], token by token, by sorting (score, index)."""
    x = logits.cpu().double()
    scores = {"softmax": torch.softmax(x, -1), "softmax_topk": x, "sigmoid": torch.sigmoid(x)}[spec.scoring]
    biases = [0.0] * x.shape[1] if bias is None else bias.cpu().double().tolist()
    all_ids, all_weights = [], []
    for row, logit in zip(scores, x.tolist(), strict=True):
        choosing = logit if bias is None else [a + b for a, b in zip(row.tolist(), biases, strict=True)]
        members = _members_of_best_groups([a + b for a, b in zip(row.tolist(), biases, strict=True)], spec)
        ids = _best(choosing, members)[: spec.top_k]
        weights = torch.softmax(row[ids], -1) if spec.scoring == "softmax_topk" else row[ids]
        if spec.normalize == "sum":
            weights = weights / (weights.sum() + 1e-20)
        all_ids.append(ids)
        all_weights.append(weights * spec.scaling_factor)
    return torch.stack(all_weights) if all_weights else x.new_zeros(0, spec.top_k), all_ids


def _best(scores: list[float], members: list[int]) -> list[int]:
    """The members from the best to the worst, NaN last, of equals the lowest first."""
    return sorted(members, key=lambda one: (math.isnan(scores[one]), 0.0 if math.isnan(scores[one]) else -scores[one], one))


def _members_of_best_groups(scores: list[float], spec: Options) -> list[int]:
    if spec.groups == 1:
        return list(range(len(scores)))
    size = len(scores) // spec.groups
    groups = [list(range(first, first + size)) for first in range(0, len(scores), size)]
    sums = [sum(scores[one] for one in _best(scores, group)[:2]) for group in groups]
    kept = _best(sums, list(range(spec.groups)))[: spec.top_k_groups]
    return [one for group in kept for one in groups[group]]


def examine(case: Case, route: Route, device: str = "cpu") -> list[str]:
    """Why the result of ``route`` is refused; empty where it is right."""
    logits, bias = tensors_of(case, device)
    before = logits.clone()
    weights, ids = route(logits, bias, case.spec)
    expected, expected_ids = reference(logits, bias, case.spec)
    shape = (case.tokens, case.spec.top_k)
    if (tuple(weights.shape), tuple(ids.shape), weights.dtype, ids.dtype) != (shape, shape, torch.float32, torch.int32):
        return [f"weights {weights.shape} {weights.dtype}, ids {ids.shape} {ids.dtype}"]
    reasons = [] if torch.equal(logits.nan_to_num(7.0), before.nan_to_num(7.0)) else ["the logits were changed"]
    for token, (got, right) in enumerate(zip(ids.tolist(), expected_ids, strict=True)):
        if got != right:
            first = next(place for place in range(len(right)) if got[place] != right[place])
            reasons.append(f"token {token}: choice {first} is {got[first]}, not {right[first]}")
    known = ~expected.isnan()  # of a row with NaN in it nothing is promised but different ids
    error = (weights.cpu().double() - expected).abs()[known] / (expected.abs()[known] + 1e-30)
    if not (error < 1e-5).all():
        reasons.append(f"the weights are off by {error.max().item():.1e} of themselves")
    return reasons


def main() -> None:
    torch.set_num_threads(1)
    from flashmoe_science.ops.moe.route.triton import bind, cannot

    assert all(cannot(case.spec, case.experts) for case in NOT_FOR_KERNEL)
    assert not any(cannot(case.spec, case.experts) for case in CASES)

    def call(x: torch.Tensor, bias: torch.Tensor | None, spec: Options) -> tuple[torch.Tensor, torch.Tensor]:
        return bind(Tensors(x, bias), spec)(x, bias)

    print(json.dumps({str(case): examine(case, call) for case in INTERPRETED}))


if __name__ == "__main__":
    main()
