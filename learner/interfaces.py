"""What the training loop needs of the computing half: any optimiser of any policy will do.

`learner.trainer.trainer.Trainer` is the real one (torch, DeepSpeed); tests bring a tiny one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from learner.data.batch import Batch, Plan

if TYPE_CHECKING:
    import torch


class Report(Protocol):
    """What one optimiser step did; `learner.trainer.trainer.StepReport` says the same.

    skipped  loss or gradient were not finite: the policy did not move, `reason` says what was wrong
    metrics  numbers to log, e.g. clip_fraction and entropy
    seconds  time of the step
    """

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def reason(self) -> str: ...
    @property
    def metrics(self) -> dict[str, float]: ...
    @property
    def tokens_trained(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class TrainEngine(Protocol):
    """The policy and its optimiser. All calls come from one thread."""

    @property
    def algorithm(self) -> Plan:
        """What `build_batch` asks for advantages."""
        ...

    @property
    def model_files(self) -> Sequence[Path]:
        """Configuration and tokenizer of the policy."""
        ...

    def train(self, batch: Batch) -> Report:
        """One optimiser step."""
        ...

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Hugging Face name -> tensor of its own on `device` ("cpu" or "cuda"), of the policy as it is now."""
        ...

    def save_state(self, directory: Path) -> None:
        """Writes model, optimiser, schedule and RNG into an empty folder."""
        ...

    def load_state(self, directory: Path) -> None:
        """Restores them, bit for bit."""
        ...

    def close(self) -> None: ...
