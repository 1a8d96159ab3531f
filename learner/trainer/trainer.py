"""The trainer: takes a batch, updates the weights (`learner.trainer.step`), returns a report, and saves its state.
Implements `learner.interfaces.TrainEngine`.
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
from learner.engine import DeepSpeedEngine, leave_ranks
from learner.interfaces import NO_TOKENS, StepReport
from learner.trainer.models import Models, build_models
from learner.trainer.step import run_step
from protocol.errors import UserError
from protocol.settings import RunSettings

WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
STATE = "trainer.json"


class Trainer:
    """Trains the policy of `run.model`, on every rank of a launcher or alone.

    A collective method must be called by every rank, in the same order: `train` or `train_rank_batch`, `iter_weights`,
    `save_state`, `snapshot_state`, `load_state`. Models and batches are moved to the rank's device here: the GPU
    `LOCAL_RANK` where torch sees one, else the CPU.

    run       `model`, `dir` and `steps` are read
    settings  section `learner` without input and output: model, algorithm, optimiser, batch, engine, reference, critic
    adapters  `iter_weights` yields the adapters, if the model has some, instead of merged weights

    Raises UserError if the model is missing, of a family that is not supported, or not as transformers computes it.
    """

    def __init__(self, run: RunSettings, settings: TrainerSettings, *, adapters: bool = False) -> None:
        if settings.engine.threads:
            torch.set_num_threads(settings.engine.threads)  # for the calling thread only, so train in the same one
        if settings.engine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first call
            torch.use_deterministic_algorithms(True)
        if settings.model.dtype == "auto":  # without a run around it
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
        """Return each rank's batch. Raises UserError for tokens outside the model's vocabulary."""
        if len(batch.shares) != self.world_size:
            raise ValueError(f"a batch for {len(batch.shares)} ranks, but there are {self.world_size}")
        largest = 0
        for micro_batch in batch.micro_batches:
            largest = max(largest, int(micro_batch.ids.max()), int(micro_batch.targets.max()))
        if largest >= self._models.vocabulary:
            # On a GPU the embedding would fail asynchronously, without details, and leave the process unusable.
            raise UserError(
                f"a trajectory contains token {largest}, but the model has {self._models.vocabulary} tokens",
                why="an engine serves another model than the learner trains",
                todo="start every process with the same run.model",
            )
        return batch.rank_batches

    def train(self, batch: Batch) -> StepReport:
        """Run `train_rank_batch` on this rank's part of a batch that every rank has; collective.

        Raises UserError for tokens outside the model's vocabulary.
        """
        rank_batch = self.rank_batches(batch)[self.rank]
        return self.train_rank_batch(rank_batch)

    def train_rank_batch(self, rank_batch: RankBatch) -> StepReport:
        """Update the weights with a batch, `rank_batch` being this rank's part; collective.

        An update whose loss or gradient is not finite on any rank is applied on none: `StepReport.reason` says so, and
        nothing is raised. Raises torch's OutOfMemoryError.
        """
        start, keep = time.perf_counter(), self.settings.token_values
        if not rank_batch.num_tokens:
            return StepReport(0.0, 0.0, True, NO_TOKENS, dict(rank_batch.stats), 0, time.perf_counter() - start)
        result = run_step(rank_batch, self._models, self.algorithm)
        if result.minibatches and keep.due(rank_batch.source.step):
            values = TokenValues()
            for tokens in result.batch:
                values.add(**tokens.columns)
            values.write(self._token_values, rank_batch.source, rank=self.rank, keep=keep.keep)
        return StepReport(
            loss=result.metrics.pop("loss"),
            grad_norm=result.update.grad_norm,
            skipped=not result.minibatches,
            reason="" if result.update.applied else "not finite",
            metrics=result.metrics,
            tokens_trained=result.tokens_trained,
            seconds=time.perf_counter() - start,
            minibatches=result.minibatches,
        )

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
