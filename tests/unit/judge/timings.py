"""Simulated samples of a kernel and of a rival that takes ``ratio`` times as long, in the ways that real ones misbehave."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Samples = tuple[list[int], list[int]]  # ns
TIME = 100_000.0


def rounded(a: NDArray[np.float64], b: NDArray[np.float64]) -> Samples:
    return np.maximum(a, 1).round().astype(int).tolist(), np.maximum(b, 1).round().astype(int).tolist()


def independent(rng: np.random.Generator, ratio: float = 1.0, noise: float = 0.01, pairs: int = 40) -> Samples:
    a, b = np.exp(noise * rng.standard_normal((2, pairs)))
    return rounded(TIME * a, ratio * TIME * b)


def few(rng: np.random.Generator, ratio: float = 1.0, noise: float = 0.01) -> Samples:
    """As few pairs as the adaptive stop ever leaves."""
    return independent(rng, ratio, noise, pairs=12)


def correlated(rng: np.random.Generator, ratio: float = 1.0, noise: float = 0.01, rho: float = 0.5, pairs: int = 40) -> Samples:
    """Each of the rival's times follows the one before."""
    steps = rng.standard_normal(pairs + 50)
    for index in range(1, len(steps)):
        steps[index] += rho * steps[index - 1]
    a = np.exp(0.2 * noise * rng.standard_normal(pairs))
    return rounded(TIME * a, ratio * TIME * np.exp(noise * math.sqrt(1 - rho**2) * steps[50:]))


def drifting(rng: np.random.Generator, ratio: float = 1.0, noise: float = 0.01, pairs: int = 40) -> Samples:
    """The clock slows by 20% over the run; taken A B B A, so the drift within a pair changes sign from pair to pair."""
    moments = 1 + 0.2 * np.arange(2 * pairs).reshape(pairs, 2) / (2 * pairs)
    moments[1::2] = moments[1::2, ::-1]
    a, b = TIME * moments.T * np.exp(noise * rng.standard_normal((2, pairs)))
    return rounded(a, ratio * b)


def heavy_tailed(rng: np.random.Generator, ratio: float = 1.0) -> Samples:
    a, b = (np.exp(0.01 * rng.standard_normal(40) + 0.3 * (rng.random(40) < 0.08)) for _ in range(2))
    return rounded(TIME * a, ratio * TIME * b)


def quantised(rng: np.random.Generator, ratio: float = 1.0, noise: float = 0.002) -> Samples:
    """A clock that ticks every 500 ns under a time of some 10 us."""
    base = 10_000 * math.exp(0.1 * rng.standard_normal())
    a, b = base * np.exp(noise * rng.standard_normal((2, 40)))
    return rounded(np.round(a / 500) * 500, np.round(ratio * b / 500) * 500)
