"""What the training loop needs of the computing half: any optimiser of any policy will do.

`learner.trainer.trainer.Trainer` is the real one (torch, DeepSpeed); tests bring a tiny one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from learner.data.batch import AdvantageEstimator, Batch

if TYPE_CHECKING:
    import torch

NO_TOKENS = "no tokens"
"""`StepReport.reason` of a batch in which nothing is left to train on."""


@dataclass(frozen=True)
class StepReport:
    """What one optimiser step did.

    loss            of the batch, before the update (of the last epoch)
    grad_norm       before clipping; not finite when `skipped` for that reason, 0 when nothing was trained
    skipped         the weights are as before, for the `reason` NO_TOKENS or "not finite"
    metrics         means over the trained tokens and maxima, with the statistics of the batch
    tokens_trained  tokens with a share in the loss, 0 when skipped
    seconds         wall time
    """

    loss: float
    grad_norm: float
    skipped: bool
    reason: str
    metrics: dict[str, float]
    tokens_trained: int
    seconds: float


class TrainEngine(Protocol):
    """The policy and its optimiser. All calls come from one thread."""

    @property
    def algorithm(self) -> AdvantageEstimator:
        """What `build_batch` asks for advantages."""
        ...

    @property
    def model_files(self) -> Sequence[Path]:
        """Configuration and tokenizer of the policy."""
        ...

    def train(self, batch: Batch) -> StepReport:
        """Make one optimiser step."""
        ...

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, a new tensor on `device`, "cpu" or "cuda") of the policy as it is now."""
        ...

    def save_state(self, directory: Path) -> None:
        """Write model, optimiser, schedule and RNG into an empty folder."""
        ...

    def load_state(self, directory: Path) -> None:
        """Restore them, bit for bit."""
        ...

    def close(self) -> None: ...
