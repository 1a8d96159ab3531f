"""The training loop's interface to training: any optimiser of any policy that implements it.

`learner.trainer.trainer.Trainer` is the real implementation (torch, DeepSpeed); tests use a tiny one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from learner.data.batch import AdvantageEstimator, Batch

NO_TOKENS = "no tokens"
"""`StepReport.reason` of a batch without trainable tokens."""


@dataclass(frozen=True)
class StepReport:
    """Report of one optimiser step.

    loss            of the batch, before the update (of the last epoch)
    grad_norm       of the last update, before clipping; not finite for that `reason`, 0 if nothing was trained
    skipped         the weights are unchanged
    reason          why an update was left out: "", NO_TOKENS or "not finite"; the updates before it were applied
    metrics         means over the tokens of the last epoch's updates, maxima, and statistics of the batch
    tokens_trained  tokens with a share in the loss of an applied update
    seconds         wall time
    minibatches     number of minibatches trained, from the first; None: all
    """

    loss: float
    grad_norm: float
    skipped: bool
    reason: str
    metrics: dict[str, float]
    tokens_trained: int
    seconds: float
    minibatches: int | None = None


class TrainEngine(Protocol):
    """The policy and its optimiser. All calls come from one thread, except that of a snapshot's function."""

    @property
    def algorithm(self) -> AdvantageEstimator:
        """Return the estimator that `build_batch` uses for advantages."""

    @property
    def world_size(self) -> int:
        """Return the number of ranks, for which `build_batch` divides a batch."""

    @property
    def model_files(self) -> Sequence[Path]:
        """Return the configuration and tokenizer files of the policy."""

    def train(self, batch: Batch) -> StepReport:
        """Make one optimiser step."""

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, a new tensor on `device`, "cpu" or "cuda") of the current policy."""

    def save_state(self, directory: Path) -> None:
        """Write model, optimiser, schedule and RNG into an empty folder."""

    def snapshot_state(self, directory: Path) -> Callable[[], None]:
        """Copy that state into main memory. Return the function that writes it into `directory`.

        Another thread may call it, once, while this engine trains: what it writes is equal to what `save_state` would
        have written. It raises OSError if it fails. It must have ended before the next snapshot.
        """

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote, bit for bit."""

    def close(self) -> None: ...
