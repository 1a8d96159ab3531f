"""The bound of M2PO: which tokens to keep, by the second moment of their log-ratios (pure torch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from learner.algorithms.base import AllReduce
from learner.algorithms.kl.estimators import LOG_RATIO_LIMIT

_EDGES, _ROUNDS = 256, 7
"""256^7 parts of the whole range: the resolution of float64."""


def second_moment_bound(squares: Sequence[torch.Tensor], threshold: float, all_reduce: AllReduce) -> float:
    """Return the largest bound b such that tokens with log(w)^2 <= b have a mean of log(w)^2 below `threshold`.

    squares      log(w)^2 of the trained tokens of each micro-batch of this rank, float64, within the clamp
    threshold    above 0 (0.04 in the paper)
    all_reduce   sums a float64 vector over the ranks; collective

    Second-moment trust policy optimisation (M2PO, arXiv 2510.01161) as in AReaL, which sorts the tokens of a
    micro-batch; here the bound is for the batch over all ranks. Equal tokens are kept or dropped together. Infinite if
    all are kept. The bound is halfway between the last kept and the first dropped value, so that rounding in a second
    forward pass changes neither.
    """
    mine = torch.cat([torch.zeros(0, dtype=torch.float64), *(x.double().cpu() for x in squares)]).sort().values
    sums = torch.cat([torch.zeros(1, dtype=torch.float64), mine.cumsum(0)])

    def below(edges: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return, over all ranks, the number of tokens at or below each edge and the sum of their squares."""
        places = torch.searchsorted(mine, edges, right=True)
        both = all_reduce(torch.cat([places.double(), sums[places]]))
        return both[: len(edges)], both[len(edges) :]

    def largest(holds: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        """Return the largest edge whose counts and sums satisfy `holds`, which is monotonic in the edge."""
        low, high = 0.0, LOG_RATIO_LIMIT**2
        for _ in range(_ROUNDS):
            edges = torch.linspace(low, high, _EDGES + 1, dtype=torch.float64)
            kept = int(holds(*below(edges)).sum())
            low, high = float(edges[max(kept - 1, 0)]), float(edges[min(kept, _EDGES)])
        return low

    count, summed = (float(x) for x in below(torch.tensor([LOG_RATIO_LIMIT**2], dtype=torch.float64)))
    if summed < threshold * max(count, 1.0):
        return math.inf
    first_out = largest(lambda counts, moments: moments < threshold * counts.clamp(min=1))
    staying = float(below(torch.tensor([first_out], dtype=torch.float64))[0])
    last_in = largest(lambda counts, moments: counts < staying)
    return (last_in + first_out) / 2
