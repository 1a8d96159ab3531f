"""AdamW that clips and refuses non-finite gradients by itself.

DeepSpeed's ZeRO stages 1 to 3 do both before they call the optimiser. Stage 0 does neither reliably: it reports no
norm, and a NaN norm would scale every weight to NaN. So the guard sits in the optimiser, and speaks the two attributes
that DeepSpeed's engine looks for: `_global_grad_norm` and `overflow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from learner.config_engine import OptimSettings


def parameter_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Matrices decay, vectors (norms, biases) do not. Empty groups are left out: ZeRO cannot partition nothing."""
    trained = [p for p in module.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


class GuardedAdamW(torch.optim.AdamW):
    """AdamW; with `guard`, a step clips to `clip_norm` (0 = never) and does nothing when the norm is not finite."""

    def __init__(self, groups: Iterable[dict[str, Any]], settings: OptimSettings, *, guard: bool) -> None:
        super().__init__(groups, lr=settings.lr, betas=(settings.beta1, settings.beta2), eps=settings.eps)
        self.guard, self.clip_norm = guard, settings.clip_norm
        self.overflow = False
        self._global_grad_norm: float | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update, unless the gradient's norm is not finite: then `overflow` is True and nothing has changed."""
        if self.guard:
            gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients)
            self._global_grad_norm = float(norm)
            self.overflow = not bool(torch.isfinite(norm))
            if self.overflow:
                return None
            if self.clip_norm:
                scale = torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
                torch._foreach_mul_(gradients, scale)
        result: float | None = super().step(closure)
        return result
