"""AdamW with built-in clipping and refusal of non-finite gradients, and its learning rate.

DeepSpeed's ZeRO stages 1 to 3 do both before they call the optimiser. Stage 0 does neither reliably: it reports no
norm, and a NaN norm would scale every weight to NaN. So the guard is in the optimiser, and sets the two attributes
that DeepSpeed's engine reads: `_global_grad_norm` and `overflow`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from learner.config.model import OptimSettings


def parameter_groups(module: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return parameter groups: matrices decay, vectors (norms, biases) do not. No empty groups: ZeRO fails on them.

    A module may have `lr_scales`, a dict of name prefix -> factor: parameters with a matching prefix (the first match)
    get groups with that `lr_scale`, all others 1.
    """
    scales: dict[str, float] = getattr(module, "lr_scales", {})
    made: dict[tuple[float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            scale = next((factor for prefix, factor in scales.items() if name.startswith(prefix)), 1.0)
            made.setdefault((scale, parameter.ndim > 1), []).append(parameter)
    # The same order on every rank and in every resumed process: by scale, matrices first.
    return [
        {"params": made[key], "weight_decay": weight_decay if key[1] else 0.0, "lr_scale": key[0]}
        for key in sorted(made, key=lambda key: (key[0], not key[1]))
    ]


BETA1 = 0.9
"""Decay of the first moment, as in every recipe."""


class GuardedAdamW(torch.optim.AdamW):
    """AdamW; with `guard`, a step clips to `clip_norm` (0: never) and does nothing if the norm is not finite.

    The update runs in one kernel: torch's default allocates copies of whole partitions on a GPU, and takes eight times
    as long on a CPU.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], settings: OptimSettings, *, guard: bool) -> None:
        super().__init__(groups, lr=settings.lr, betas=(BETA1, settings.beta2), eps=settings.eps, fused=True)
        self.guard, self.clip_norm = guard, settings.clip_norm
        self.overflow = False
        self._global_grad_norm: float | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update, unless the gradient norm is not finite: then set `overflow` and change nothing."""
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

    def state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return AdamW's state of a parameter; initialise it as before a first step if there is none yet."""
        state: dict[str, torch.Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def kept(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """Return the parameter itself for "master", else its state of that name, with the same shape."""
        return parameter.detach() if key == "master" else self.state_of(parameter)[key]


def learning_rate(settings: OptimSettings, done: int, total: int) -> float:
    """Return the rate of update number `done` (from 0) of `total`: linear warm-up, then constant, linear or cosine
    decay.

    The first update has lr / warmup, never 0; the decay reaches final_fraction * lr at the last update.
    A warm-up given as a fraction is rounded down to whole updates, as verl does. The rate depends only on `done`:
    there is no scheduler state.
    """
    warmup = settings.warmup_steps or int(settings.warmup_fraction * total)
    if done < warmup:
        return settings.lr * (done + 1) / warmup
    if settings.schedule == "constant":
        return settings.lr
    span = max(1, total - 1 - warmup)
    progress = min(1.0, (done - warmup) / span)
    falling = 1.0 - progress if settings.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return settings.lr * (settings.final_fraction + (1.0 - settings.final_fraction) * falling)
