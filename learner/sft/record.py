"""What one training is made from and has done: its identity, its progress, its result. Imports no framework."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from learner.config.learner import TrainerSettings
from learner.config.sft import SftSettings
from learner.sft.batches import SftExample, held_out, num_updates
from protocol.errors import UserError
from protocol.runtime.files import model_digest

RECORD = "sft.json"
"""File in the finished model's folder: SftProgress and identity."""


@dataclass(frozen=True)
class SftPlan:
    """One training. `trainer` gives model, packing and threads as in a run."""

    model: Path
    out: Path
    examples: Sequence[SftExample]
    evaluated: Sequence[SftExample]
    settings: SftSettings
    trainer: TrainerSettings
    seed: int

    @classmethod
    def of(
        cls,
        examples: Sequence[SftExample],
        *,
        model: Path,
        out: Path,
        settings: SftSettings,
        trainer: TrainerSettings,
        seed: int,
    ) -> SftPlan:
        """Return the plan for all `examples`, of which the share of the settings is held out."""
        apart = [held_out(example, settings.eval_share) for example in examples]
        trained = [example for example, out_of in zip(examples, apart, strict=True) if not out_of]
        evaluated = [example for example, out_of in zip(examples, apart, strict=True) if out_of]
        if not trained:
            raise UserError("there is no conversation to train on", todo="lower sft.eval_share, or give more")
        return cls(model, out, trained, evaluated, settings, trainer, seed)

    @property
    def steps(self) -> int:
        """Return the number of updates."""
        settings = self.settings
        return num_updates(len(self.examples), settings.batch_size, settings.epochs, settings.max_steps)

    @property
    def folder(self) -> Path:
        """Return the folder of checkpoints, beside the result."""
        return self.out.with_name(f".{self.out.name}.training")

    @cached_property
    def identity(self) -> str:
        """Return a hash of everything that determines the result, except the machine."""
        digest = hashlib.sha256()
        settings = self.settings.model_dump(mode="json", exclude={"checkpoint_s"})
        parts = [settings, self.seed, self.trainer.model.model_dump(mode="json"), model_digest(self.model)]
        parts.append(self.trainer.batch.model_dump(mode="json"))
        digest.update(json.dumps(parts, sort_keys=True).encode())
        for example in (*self.examples, *self.evaluated):
            digest.update(example.ids.tobytes() + b"/" + example.trained.tobytes() + b"\n")
        return digest.hexdigest()

    def finished(self) -> SftProgress | None:
        """Return the progress of a finished training with this plan, None if there is no result yet.

        Raises UserError if the folder is the result of something else.
        """
        if not self.out.exists():
            return None
        try:
            found = json.loads((self.out / RECORD).read_text(encoding="utf-8"))
            same = found.pop("identity") == self.identity
            progress = SftProgress(**found)
        except (OSError, ValueError, TypeError, KeyError):
            same, progress = False, SftProgress()
        if not same:
            raise UserError(
                f"{self.out} already exists",
                why="it is not the result of these demonstrations, this model and these settings",
                todo="choose another --out, or remove the folder",
            )
        return progress

    def refuse_other(self, identity: str) -> None:
        """Raise UserError if the checkpoints are of a training with another `identity`."""
        if identity != self.identity:
            raise UserError(
                f"{self.folder} has checkpoints of another training",
                why="the demonstrations, the model or the settings have changed since it was interrupted",
                todo=f"repeat its command to continue it, or remove {self.folder} to begin again",
            )


@dataclass
class SftProgress:
    """What has been done, over all starts of one training.

    tokens   read, without padding; trained_tokens: of these, the policy's
    losses   first and last loss: mean negative log-prob of a trained token of the update, in nats
    evals    (step, loss) of the held-out conversations
    """

    step: int = 0
    steps: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    first_loss: float = 0.0
    last_loss: float = 0.0
    dtype: str = ""
    evals: list[list[float]] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)
