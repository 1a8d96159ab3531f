"""One training step: takes a batch, updates the weights, returns a report. Implements `learner.interfaces.TrainEngine`.

rank batch -> forward passes (policy, reference, critic: no gradient) -> advantages and returns (over all ranks)
           -> epochs x minibatches: micro-batches forward and backward -> update of the policy, update of the critic
           -> the reference is updated
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from learner.algorithms import build_algorithm
from learner.algorithms.base import Algorithm
from learner.checkpoint.resume import with_dtype
from learner.config.learner import TrainerSettings
from learner.data.batch import Batch, RankBatch
from learner.data.token_values import FOLDER, TokenValues
from learner.engine import DeepSpeedEngine, OptimizerUpdate, leave_ranks
from learner.interfaces import NO_TOKENS, StepReport
from learner.trainer.forward import forward_batch
from learner.trainer.models import Models, build_models
from learner.trainer.tensors import ForwardBatch
from learner.trainer.update import MetricSums, UpdateResult, update_minibatch
from protocol.errors import UserError
from protocol.settings import RunSettings

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
STATE = "trainer.json"


class Trainer:
    """Trains the policy of `run.model`, on every rank of a launcher or alone.

    Every rank must call the collective methods (`train` or `train_rank_batch`, `iter_weights`, `save_state`,
    `snapshot_state`, `load_state`) in the same order. Raises UserError if the model is missing.

    adapters  `iter_weights` yields the adapters, if the model has some, instead of merged weights
    """

    def __init__(self, run: RunSettings, settings: TrainerSettings, *, adapters: bool = False) -> None:
        if settings.engine.threads:
            torch.set_num_threads(settings.engine.threads)  # for the calling thread only, so train in the same one
        if settings.engine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
            torch.use_deterministic_algorithms(True)
        if settings.model.dtype == "auto":  # without a run around it, or on another rank
            settings = with_dtype(run, settings)
        self.algorithm: Algorithm = build_algorithm(settings.algorithm)
        self.settings = settings
        self._directory, self._adapters = run.model, adapters
        self._token_values = run.dir / FOLDER
        updates = run.steps * self.algorithm.epochs * self.algorithm.minibatches
        self._models: Models = build_models(run, settings, self.algorithm.requirements, updates)

    @property
    def engine(self) -> DeepSpeedEngine:
        """Return the policy's engine."""
        return self._models.policy

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self.engine.rank

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.engine.world_size

    @property
    def updates(self) -> int:
        """Return the number of policy updates since the beginning of the run."""
        return self.engine.updates

    @property
    def model_files(self) -> list[Path]:
        """Return config, tokenizer and other files beside the initial weights, which make a published version
        loadable."""
        files = (path for path in sorted(self._directory.iterdir()) if path.is_file())
        return [path for path in files if not path.name.endswith(WEIGHT_SUFFIXES)]

    def rank_batches(self, batch: Batch) -> list[RankBatch]:
        """Return each rank's share. Raises UserError for tokens outside the model's vocabulary."""
        if len(batch.shares) != self.world_size:
            raise ValueError(f"a batch for {len(batch.shares)} ranks, but there are {self.world_size}")
        largest = max((int(max(m.ids.max(), m.targets.max())) for m in batch.micro_batches), default=0)
        if largest >= self._models.vocabulary:
            # On a GPU the embedding would fail asynchronously, without details, and leave the process unusable.
            raise UserError(
                f"a trajectory contains token {largest}, but the model has {self._models.vocabulary} tokens",
                why="an engine serves another model than the learner trains",
                todo="start every process with the same run.model",
            )
        return batch.rank_batches

    def train(self, batch: Batch) -> StepReport:
        """Run `train_rank_batch` on this rank's share of a batch that every rank has; collective."""
        return self.train_rank_batch(self.rank_batches(batch)[self.rank])

    def train_rank_batch(self, rank_batch: RankBatch) -> StepReport:
        """Update the weights with a batch, `rank_batch` being this rank's share; collective."""
        start = time.perf_counter()
        if not rank_batch.num_tokens:
            return StepReport(0.0, 0.0, True, NO_TOKENS, dict(rank_batch.stats), 0, time.perf_counter() - start)
        forwards = forward_batch(rank_batch, self._models, self.algorithm)
        advantages, facts = self.algorithm.compute_advantages(forwards.flat, self.engine.total)
        result = self._passes(rank_batch, forwards.with_advantages(advantages))
        applied = result.minibatches > 0
        if applied:
            self.algorithm.after_update()
            self._models.after_update()
            if result.tokens is not None:
                keep = self.settings.token_values.keep
                result.tokens.write(self._token_values, rank_batch.source, rank=self.rank, keep=keep)
        metrics, tokens = self._metrics(rank_batch, result)
        metrics |= facts | result.facts
        return StepReport(
            loss=metrics.pop("loss"),
            grad_norm=result.update.grad_norm,
            skipped=not applied,
            reason="" if result.update.applied else "not finite",
            metrics=metrics,
            tokens_trained=tokens,
            seconds=time.perf_counter() - start,
            minibatches=result.minibatches,
        )

    def _passes(self, rank_batch: RankBatch, forwards: ForwardBatch) -> UpdateResult:
        """Run every epoch over every minibatch, until an update is not finite.

        Totals and token values are those of the last epoch.
        """
        due = self.settings.token_values.due(rank_batch.source.step)
        result = UpdateResult(OptimizerUpdate(0.0, False), TokenValues() if due else None)
        for _ in range(self.algorithm.epochs):
            result.totals = MetricSums()
            if result.tokens is not None:
                result.tokens.clear()
            for number in range(len(rank_batch.minibatches)):
                update_minibatch(number, forwards, self._models, self.algorithm, result)
                if not result.update.applied:
                    return result
        return result

    def _metrics(self, rank_batch: RankBatch, result: UpdateResult) -> tuple[dict[str, float], int]:
        """Return the metrics, and the number of tokens in applied updates, over all ranks; collective."""
        totals = result.totals
        trained = [m for part in rank_batch.minibatches[: result.minibatches] for m in part]
        tokens = float(sum(int((m.weights > 0).sum()) for m in trained))
        # Every rank has at least a dummy, so all ranks have the same names in the same order.
        (tokens, *sums), maxima = self.engine.reduce([tokens, *totals.sums_list()], list(totals.maxima.values()))
        return totals.report(sums, maxima) | rank_batch.stats, int(tokens)

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, tensor on `device`) of every weight, tied ones once, as `save_pretrained` would;
        collective. Adapters are merged, or are the only weights if they are published alone.
        """
        yield from self._models.iter_published(device, adapters=self._adapters)

    def save_state(self, directory: Path) -> None:
        """Write all state needed to continue bit for bit; collective."""
        self._models.save(directory)
        if self.rank == 0:
            (directory / STATE).write_text(json.dumps({"algorithm": self.algorithm.state()}))

    def snapshot_state(self, directory: Path) -> Callable[[], None]:
        """Copy this rank's share of that state into main memory; collective. Return the function that writes it, which
        another thread may call while training goes on. It raises OSError.
        """
        writers = self._models.snapshot(directory)
        own = json.dumps({"algorithm": self.algorithm.state()})

        def write() -> None:
            for writer in writers:
                writer()
            if self.rank == 0:
                (directory / STATE).write_text(own)

        return write

    def load_state(self, directory: Path) -> None:
        """Restore what `save_state` wrote, with any number of ranks and at any ZeRO stage; collective."""
        self._models.load(directory)
        try:
            self.algorithm.load(json.loads((directory / STATE).read_text())["algorithm"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"cannot load the algorithm's state in {directory / STATE}",
                why=f"{type(error).__name__}: {error}",
                todo="resume with the learner.algorithm settings that the run started with",
            ) from None

    def close(self) -> None:
        """Leave the process group; the trainer cannot be used afterwards."""
        self._models.close()
        leave_ranks()
