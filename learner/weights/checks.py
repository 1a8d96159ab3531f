"""Check that tensors are plausible weights of the policy, one by one, before they are announced.

Rejected: a non-finite value; a tensor of zeros that was not zero in the last published version; a norm of all weights
that is many times, or a small fraction of, the last version's. An optimiser step changes weights by a small part, so
such a jump is an error: a learning rate that is off by orders of magnitude, an optimiser state that was not restored,
a flipped bit in an exponent.

It costs one pass over tensors that are gathered anyway. Norms are Euclidean, in float32 per CHUNK and float64 between
them. On a GPU reading a value waits for all work before it, so a deferred check reads all values at once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from learner.weights.base import BadWeights, PackingError
from protocol.versions import PolicyVersion

CHUNK = 1 << 24
"""Elements converted to float32 at a time."""


class WeightCheck:
    """Checks one version. `norms`: Euclidean norm of each tensor seen so far, by name."""

    def __init__(self, last: dict[str, float], max_jump: float, *, deferred: bool = False) -> None:
        """Start the check of a version.

        Args:
            last: norms of the previous version, {} if none.
            max_jump: factor between the total norms, 0: any.
            deferred: nothing is raised before `finish`, which reads the values from the device once.
        """
        self.norms: dict[str, float] = {}
        self.deferred = deferred
        self._norms: list[tuple[str, torch.Tensor]] = []
        self._bits: dict[str, torch.Tensor] = {}
        self._differs: list[tuple[str, torch.Tensor]] = []
        self._last, self._max_jump = last, max_jump
        self._last_total = math.hypot(*last.values())
        self._square = 0.0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Check the next tensor, of any shape and dtype; integers pass. Raises BadWeights with its name."""
        if self.deferred:
            self._bits[name] = _bits(tensor)
        if not tensor.is_floating_point() or not tensor.numel():
            return
        norm = norm_of(tensor)
        if self.deferred:
            self._norms.append((name, norm))
        else:
            self._judge(name, float(norm))

    def compare(self, packed: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Compare tensors, read from a bucket where an engine will read them, with those that were added. If deferred.

        By the sums of their bits: an element-wise comparison takes as much memory as the tensor.
        """
        if self.deferred:
            self._differs += [(name, _bits(tensor) != self._bits.pop(name)) for name, tensor in packed]

    def _judge(self, name: str, norm: float) -> None:
        if not math.isfinite(norm):
            raise BadWeights(f"tensor {name} contains a non-finite value")
        before = self._last.get(name, 0.0)
        if norm == 0.0 and before:
            raise BadWeights(f"tensor {name} is all zeros, but its norm was {before:.4g} in the previous version")
        self.norms[name] = norm
        self._square += norm * norm
        if self._compares and math.sqrt(self._square) > self._max_jump * self._last_total:
            raise self._jumped(f"at least {math.sqrt(self._square) / self._last_total:.3g} times")

    def finish(self) -> None:
        """Finish after the last tensor. Raises BadWeights if the total norm has shrunk too much.

        Deferred: raises BadWeights for any tensor, and PackingError.
        """
        self._read()
        total = math.sqrt(self._square)
        if self._compares and total * self._max_jump < self._last_total:
            raise self._jumped(f"{total / self._last_total:.3g} times")

    def _read(self) -> None:
        values = [*(norm for _, norm in self._norms), *(differs.double() for _, differs in self._differs)]
        read = torch.stack(values).tolist() if values else []
        for (name, _), differs in zip(self._differs, read[len(self._norms) :], strict=True):
            if differs:
                raise PackingError(f"{name} in its bucket differs from the policy")
        for (name, _), norm in zip(self._norms, read, strict=False):
            self._judge(name, norm)
        self._norms, self._differs = [], []

    @property
    def _compares(self) -> bool:
        return self._max_jump > 0 and self._last_total > 0

    def _jumped(self, times: str) -> BadWeights:
        def moved(name: str) -> float:
            return abs(self.norms[name] - self._last.get(name, 0.0))

        worst = max(self.norms, key=moved)
        return BadWeights(
            f"the norm of all weights is {times} that of the previous version (learner.publish.max_norm_jump is "
            f"{self._max_jump:g}); tensor {worst} changed most: from {self._last.get(worst, 0.0):.4g} to "
            f"{self.norms[worst]:.4g}"
        )


class WeightChecker:
    """Keeps the norms of the last published version. Two threads may check versions."""

    def __init__(self, max_jump: float) -> None:
        self._max_jump = max_jump
        self._last: tuple[PolicyVersion, dict[str, float]] = (PolicyVersion(0, 0), {})

    def inspection(self, *, deferred: bool = False) -> WeightCheck:
        """Return the check of one version."""
        return WeightCheck(self._last[1], self._max_jump, deferred=deferred)

    def published(self, version: PolicyVersion, seen: WeightCheck) -> None:
        """Record that `version` was published; `seen` checked it. The next version is compared with it."""
        if version >= self._last[0]:
            self._last = version, seen.norms


def norm_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the Euclidean norm, [] float64; not finite if an element is not, or if its square overflows float32."""
    flat = tensor.detach().reshape(-1)
    wide = torch.promote_types(flat.dtype, torch.float32)
    squares = [torch.linalg.vector_norm(part, dtype=wide).double() ** 2 for part in torch.split(flat, CHUNK)]
    return torch.stack(squares).sum().sqrt()


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the elements' bits, read as integers."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.detach().reshape(-1).view(integers[tensor.element_size()]).sum(dtype=torch.int64)
