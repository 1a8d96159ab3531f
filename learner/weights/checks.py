"""Check that tensors are the weights of a sane policy, one by one as they pass, before they are announced.

Refused: a number that is not finite; a tensor of zeros that was not zero in the last published version; and a norm of
all weights together that is many times, or a small fraction of, the last version's. An optimiser step moves weights by
a small part of themselves, so such a jump is an accident: a learning rate that is off by orders of magnitude, an
optimiser state that was not restored, a bit that flipped in an exponent.

Costs one pass over what is gathered anyway. Norms are Euclidean, in float32 per CHUNK and float64 between them.
"""

from __future__ import annotations

import math

import torch

from learner.weights.base import BadWeights
from protocol.versions import PolicyVersion

CHUNK = 1 << 24
"""Elements whose float32 copies exist at a time."""


class WeightCheck:
    """One version on its way. `norms`: Euclidean norm of each tensor seen so far, by name."""

    def __init__(self, last: dict[str, float], max_jump: float) -> None:
        """last  norms of the version before, {} for none; max_jump  factor between the whole norms, 0: any"""
        self.norms: dict[str, float] = {}
        self._last, self._max_jump = last, max_jump
        self._last_total = math.hypot(*last.values())
        self._square = 0.0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """The next tensor, of any shape and dtype; integers pass. Raises BadWeights that names it."""
        if not tensor.is_floating_point() or not tensor.numel():
            return
        norm = norm_of(tensor)
        if not math.isfinite(norm):
            raise BadWeights(f"tensor {name} holds a number that is not finite")
        before = self._last.get(name, 0.0)
        if norm == 0.0 and before:
            raise BadWeights(f"tensor {name} is all zeros, and its norm was {before:.4g} in the version before")
        self.norms[name] = norm
        self._square += norm * norm
        if self._compares and math.sqrt(self._square) > self._max_jump * self._last_total:
            raise self._jumped(f"at least {math.sqrt(self._square) / self._last_total:.3g} times")

    def finish(self) -> None:
        """All have been seen. Raises BadWeights when they have shrunk together as none of them may have grown."""
        total = math.sqrt(self._square)
        if self._compares and total * self._max_jump < self._last_total:
            raise self._jumped(f"{total / self._last_total:.3g} times")

    @property
    def _compares(self) -> bool:
        return self._max_jump > 0 and self._last_total > 0

    def _jumped(self, times: str) -> BadWeights:
        def moved(name: str) -> float:
            return abs(self.norms[name] - self._last.get(name, 0.0))

        worst = max(self.norms, key=moved)
        return BadWeights(
            f"the norm of all weights is {times} that of the version before (learner.publish.max_norm_jump is "
            f"{self._max_jump:g}); tensor {worst} moved most: from {self._last.get(worst, 0.0):.4g} to "
            f"{self.norms[worst]:.4g}"
        )


class WeightChecker:
    """Remembers the norms of the last version that was published. Versions may be inspected from two threads."""

    def __init__(self, max_jump: float) -> None:
        self._max_jump = max_jump
        self._last: tuple[PolicyVersion, dict[str, float]] = (PolicyVersion(0, 0), {})

    def inspection(self) -> WeightCheck:
        """For one version."""
        return WeightCheck(self._last[1], self._max_jump)

    def published(self, version: PolicyVersion, seen: WeightCheck) -> None:
        """`version`, which was `seen` whole, has been published: the next one is compared with it."""
        if version >= self._last[0]:
            self._last = version, seen.norms


def norm_of(tensor: torch.Tensor) -> float:
    """Euclidean norm; not finite when an element is not, or when it is so large that its square is not in float32."""
    flat = tensor.detach().reshape(-1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    squares = [torch.linalg.vector_norm(part, dtype=wide).double() ** 2 for part in torch.split(flat, CHUNK)]
    return float(torch.stack(squares).sum().sqrt())
