"""One training step: a batch in, moved weights and a report out. What the learner's service half talks to."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from learner.algorithms.base import Algorithm, LossOutput, TokenInputs
from learner.batch import Batch, MicroBatch, cut_for_ranks
from learner.config_trainer import TrainerSettings
from learner.engine import DeepSpeedEngine, Update
from learner.model import load_policy
from learner.reference import FrozenReference
from protocol.errors import UserError
from protocol.settings import RunSettings

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
PREFIX = "causal."
"""What PolicyModel adds to the names of transformers."""


@dataclass(frozen=True)
class StepReport:
    """What came of one batch.

    loss            of the batch, before the update (of the last epoch)
    grad_norm       before clipping; not finite when `skipped` for that reason, 0 when nothing was trained
    skipped         the weights are as before, for the `reason` "no tokens" or "not finite"
    metrics         means over the trained tokens and maxima, with the statistics of the batch
    tokens_trained  tokens with a share in the loss, 0 when skipped
    seconds         of wall time
    """

    loss: float
    grad_norm: float
    skipped: bool
    reason: str
    metrics: dict[str, float]
    tokens_trained: int
    seconds: float


@dataclass
class _Totals:
    loss: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, output: LossOutput) -> None:
        self.loss += float(output.loss.detach())
        for name, value in output.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)
        for name, value in output.maxima.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), float(value))


class Trainer:
    """The policy of `run.model` under training, on every rank of a launcher or alone.

    Every rank must call the collective methods (`train`, `iter_weights`, `save_state`, `load_state`) in one order and
    give `train` the same batch; each takes its own micro-batches from it. Raises UserError when there is no such model.
    """

    def __init__(self, run: RunSettings, settings: TrainerSettings) -> None:
        if settings.engine.threads:
            torch.set_num_threads(settings.engine.threads)  # of the calling thread only, so train in the same one
        self.algorithm: Algorithm = settings.algorithm.build()
        self._directory = run.model
        policy = load_policy(run.model, settings.model)
        self._vocabulary = policy.vocabulary
        self._engine = DeepSpeedEngine(
            policy,
            settings,
            total_updates=run.steps * settings.algorithm.epochs,
            seed=run.seed,
        )
        self._reference = (
            FrozenReference(run.model, settings.model, self._engine.device) if self.algorithm.needs_reference else None
        )

    @property
    def rank(self) -> int:
        """Number of this process among the ranks."""
        return self._engine.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._engine.world_size

    @property
    def updates(self) -> int:
        """Updates applied since the beginning of the run."""
        return self._engine.updates

    @property
    def model_files(self) -> list[Path]:
        """Config, tokenizer and what else lies beside the initial weights: what makes a published version loadable."""
        files = (path for path in sorted(self._directory.iterdir()) if path.is_file())
        return [path for path in files if not path.name.endswith(WEIGHT_SUFFIXES)]

    def train(self, batch: Batch) -> StepReport:
        """Update the weights with `batch`, `algorithm.epochs` times; collective."""
        start = time.perf_counter()
        if not batch.num_tokens:
            return StepReport(0.0, 0.0, True, "no tokens", dict(batch.stats), 0, time.perf_counter() - start)
        self._refuse_other_vocabulary(batch)
        micro_batches = cut_for_ranks(batch, self.world_size)[self.rank]
        old = self._old_logprobs(micro_batches, batch.temperature)
        update, totals = Update(0.0, False), _Totals()
        for _ in range(self.algorithm.epochs):
            update, totals = self._epoch(micro_batches, old, batch.temperature)
            if not update.applied:
                break
        metrics = self._metrics(batch, totals)
        return StepReport(
            loss=metrics.pop("loss"),
            grad_norm=update.grad_norm,
            skipped=not update.applied,
            reason="" if update.applied else "not finite",
            metrics=metrics,
            tokens_trained=batch.num_tokens if update.applied else 0,
            seconds=time.perf_counter() - start,
        )

    def _refuse_other_vocabulary(self, batch: Batch) -> None:
        # On a GPU the embedding would fail asynchronously, naming nothing, and leave the process unusable.
        largest = max(int(max(m.ids.max(), m.targets.max())) for m in batch.micro_batches)
        if largest >= self._vocabulary:
            raise UserError(
                f"a trajectory holds token {largest}, and the model has {self._vocabulary}",
                why="an engine serves another model than the learner trains",
                todo="start every process with the same run.model",
            )

    def _epoch(
        self, micro_batches: list[MicroBatch], old: list[torch.Tensor] | None, temperature: float
    ) -> tuple[Update, _Totals]:
        totals = _Totals()
        for number, micro_batch in enumerate(micro_batches):
            output = self._loss(micro_batch, old[number] if old else None, temperature)
            self._engine.backward(output.loss)
            totals.add(output)
        return self._engine.step(), totals

    def _loss(self, micro_batch: MicroBatch, old: torch.Tensor | None, temperature: float) -> LossOutput:
        inputs = self._forward_inputs(micro_batch, temperature)
        scores = self._engine.forward(*inputs)
        behaviour = self._tensor(micro_batch.behaviour)
        weights = self._tensor(micro_batch.weights)
        if old is None:
            # Before a single update the proximal policy is the policy itself.
            old = scores.logprobs.detach() if self.algorithm.recomputes_old else behaviour
        return self.algorithm.loss(
            TokenInputs(
                logprobs=scores.logprobs,
                entropy=scores.entropy,
                behaviour=behaviour,
                old=old,
                reference=None if self._reference is None else self._reference.logprobs(*inputs),
                advantages=self._tensor(micro_batch.advantages),
                weights=weights,
                mask=weights > 0,
                trajectory=self._tensor(micro_batch.trajectory),
            )
        )

    def _old_logprobs(self, micro_batches: list[MicroBatch], temperature: float) -> list[torch.Tensor] | None:
        if not (self.algorithm.recomputes_old and self.algorithm.epochs > 1):
            return None
        with torch.no_grad():
            return [self._engine.forward(*self._forward_inputs(m, temperature)).logprobs for m in micro_batches]

    def _forward_inputs(self, micro_batch: MicroBatch, temperature: float) -> tuple[Any, ...]:
        packed = int(micro_batch.documents.max()) > 0
        return (
            self._tensor(micro_batch.ids),
            self._tensor(micro_batch.positions),
            self._tensor(micro_batch.documents) if packed else None,
            self._tensor(micro_batch.index),
            self._tensor(micro_batch.targets),
            temperature,
            self.algorithm.needs_entropy_gradient,
        )

    def _tensor(self, array: Any) -> torch.Tensor:
        return torch.from_numpy(array).to(self._engine.device)

    def _metrics(self, batch: Batch, totals: _Totals) -> dict[str, float]:
        # Every rank has at least a dummy, so all of them hold the same names in the same order.
        sums, maxima = self._engine.reduce([totals.loss, *totals.sums.values()], list(totals.maxima.values()))
        means = {name: value / batch.num_tokens for name, value in zip(totals.sums, sums[1:], strict=True)}
        return {"loss": sums[0], **means, **dict(zip(totals.maxima, maxima, strict=True)), **batch.stats}

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, tensor on `device`) of every weight, tied ones once, as `save_pretrained` would;
        collective.
        """
        for name, tensor in self._engine.iter_weights(device):
            yield name.removeprefix(PREFIX), tensor

    def save_state(self, directory: Path) -> None:
        """Write all that another process needs to go on bit for bit; collective."""
        self._engine.save_state(directory)

    def load_state(self, directory: Path) -> None:
        """Take up what `save_state` wrote, with as many ranks and the same ZeRO stage; collective."""
        self._engine.load_state(directory)

    def close(self) -> None:
        """Leave the process group; the trainer is of no use afterwards."""
        self._engine.close()
