"""A trainer on several ranks behind one interface: rank 0 runs the loop, the others follow its commands.

rank 0   LeaderEngine: send each rank's share, make the same call on all ranks, then check that all succeeded
others   follow: run one command after the other

A checkpoint's snapshot is written by a thread of each rank, while these train. The threads compare their results over a
gloo group that nothing else uses.

Only rank 0 has Redis, batches and the delivery state. Checkpoint folders must be visible to every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from learner.background_call import BackgroundCall
from learner.data.batch import AdvantageEstimator, Batch, RankBatch
from learner.interfaces import StepReport, TrainEngine
from learner.trainer.distributed.channel import RankChannel, decode, encode, others_alive
from protocol.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LEARN, WEIGHTS, SAVE, SNAPSHOT, LOAD, CLOSE = "learn", "weights", "save", "snapshot", "load", "close"
NOWHERE = "meta"
"""Device of the copies of weights on other ranks than 0: they take no memory."""


class SharedTrainer(TrainEngine, Protocol):
    """The part of `learner.trainer.trainer.Trainer` for several ranks; calls that compute are collective."""

    def rank_batches(self, batch: Batch) -> list[RankBatch]:
        """Return each rank's input of `train_rank_batch`."""

    def train_rank_batch(self, rank_batch: RankBatch) -> StepReport:
        """Run one training step, with `rank_batch` as this rank's share."""


class LeaderEngine:
    """`learner.interfaces.TrainEngine` on rank 0. All calls come from one thread.

    A disk error or a damaged file on any rank fails the call here and on all ranks in step, and the engine remains
    usable. Any other error leaves the ranks out of step: then `close` sends nothing, and the others end when their
    connections close.
    """

    def __init__(self, trainer: SharedTrainer, ranks: RankChannel, writers: RankChannel) -> None:
        self._trainer, self._ranks, self._writers = trainer, ranks, writers
        self._sending: Iterator[tuple[str, torch.Tensor]] | None = None
        self._in_step = True

    @property
    def algorithm(self) -> AdvantageEstimator:
        """Return the estimator that `build_batch` uses for advantages."""
        return self._trainer.algorithm

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._ranks.size

    @property
    def model_files(self) -> Sequence[Path]:
        """Return the configuration and tokenizer files of the policy."""
        return self._trainer.model_files

    def train(self, batch: Batch) -> StepReport:
        """Run one optimiser step, each rank with its share."""
        rank_batches = self._trainer.rank_batches(batch)
        self._begin(LEARN, [encode(rank_batch) for rank_batch in rank_batches])
        with others_alive("the step"):
            report = self._trainer.train_rank_batch(rank_batches[0])
        self._in_step = True
        return report

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """As `Trainer.iter_weights`. Unconsumed weights are gathered anyway, because the other ranks take part."""
        self._begin(WEIGHTS)
        self._sending = self._trainer.iter_weights(device)
        return self._weights(self._sending)

    def _weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            with others_alive("gathering the weights"):
                for pair in weights:  # noqa: UP028  # `yield from` would also close `weights`
                    yield pair
        except GeneratorExit:
            if self._sending is weights:
                self._drain()
            raise
        if self._sending is weights:
            self._sending, self._in_step = None, True

    def save_state(self, directory: Path) -> None:
        """Write every rank's part into `directory`. Raises OSError if one of them fails."""
        self._together(SAVE, directory, self._trainer.save_state)

    def snapshot_state(self, directory: Path) -> Callable[[], None]:
        """Copy every rank's part into main memory. Return the function that waits until all ranks have written theirs.

        The others begin to write at once, so `directory` must exist.
        """
        self._begin(SNAPSHOT, [str(directory).encode()] * self._ranks.size)
        with others_alive("the snapshot"):
            write = self._trainer.snapshot_state(directory)
        self._in_step = True

        def written() -> None:
            if failures := _written(self._writers, write):
                raise OSError("; ".join(failures))

        return written

    def load_state(self, directory: Path) -> None:
        """Load every rank's part. Raises UserError if one of them fails."""
        self._together(LOAD, directory, self._trainer.load_state)

    def close(self) -> None:
        """Close, and end the other ranks if they are reachable."""
        if self._in_step or self._sending is not None:
            self._begin(CLOSE)
        self._trainer.close()

    def _begin(self, command: str, payloads: Sequence[bytes] = ()) -> None:
        self._drain()
        self._ranks.send(command, payloads)
        self._in_step = False

    def _drain(self) -> None:
        weights, self._sending = self._sending, None
        if weights is not None:
            with others_alive("gathering the weights"):
                for _ in weights:
                    pass
            self._in_step = True

    def _together(self, command: str, directory: Path, call: Callable[[Path], None]) -> None:
        self._begin(command, [str(directory).encode()] * self._ranks.size)
        failures = _attempt(self._ranks, call, directory)
        self._in_step = True
        if failures and command == SAVE:
            raise OSError("; ".join(failures))
        if failures:
            raise UserError(
                f"cannot load the saved state in {directory}",
                why="; ".join(failures),
                todo="every rank must see the checkpoint folder; restore the file, or resume from an older checkpoint",
            )


def _attempt(ranks: RankChannel, call: Callable[[Path], None], directory: Path) -> list[str]:
    """Call, and exchange the results with the others. Return the failures of all ranks as text."""
    try:
        with others_alive(f"the state in {directory}"):
            call(directory)
    except UserError as error:
        return ranks.gather_errors(False, f"{error.what}: {error.why}")
    except OSError as error:
        return ranks.gather_errors(False, str(error))
    return ranks.gather_errors(True)


def _written(writers: RankChannel, write: Callable[[], None]) -> list[str]:
    """Write this rank's part of a snapshot, and return the failures of all ranks. Raises RankLost."""
    try:
        write()
    except Exception as error:  # the others wait for the result, whatever it is
        log.error("cannot write the snapshot: %s", error, exc_info=not isinstance(error, OSError))
        return writers.gather_errors(False, str(error))
    return writers.gather_errors(True)


def lead(trainer: SharedTrainer) -> TrainEngine:
    """Return the engine for the loop on rank 0; the trainer itself if it is alone. Collective with `run_follower`."""
    return LeaderEngine(trainer, RankChannel(), RankChannel()) if trainer.world_size > 1 else trainer


def run_follower(trainer: SharedTrainer) -> None:
    """Follow the commands of rank 0. Raises RankLost if rank 0 ends unexpectedly."""
    follow(trainer, RankChannel(), RankChannel())


def follow(trainer: SharedTrainer, ranks: RankChannel, writers: RankChannel) -> None:
    """Run the commands of rank 0 until `close`.

    consumes      commands of rank 0, with this rank's share of a batch or the name of a folder
    produces      its part in collectives, its files of a checkpoint, and the result of each
    waits for     the next command, without a limit
    unblocked by  the command `close`, or the end of rank 0 (RankLost)
    """
    writing: BackgroundCall[list[str]] | None = None
    while True:
        command, payload = ranks.receive()
        if command in (SNAPSHOT, CLOSE) and writing is not None:
            writing.result()
        if command == CLOSE:
            trainer.close()
            return
        with others_alive(command):
            if command == SNAPSHOT:
                write = trainer.snapshot_state(Path(payload.decode()))
                writing = BackgroundCall("checkpoint", partial(_written, writers, write))
            else:
                _obey(trainer, ranks, command, payload)


def _obey(trainer: SharedTrainer, ranks: RankChannel, command: str, payload: bytes) -> None:
    if command == LEARN:
        trainer.train_rank_batch(decode(payload, RankBatch))
    elif command == WEIGHTS:
        for _ in trainer.iter_weights(NOWHERE):
            pass
    elif command in (SAVE, LOAD):
        call = trainer.save_state if command == SAVE else trainer.load_state
        for failure in _attempt(ranks, call, Path(payload.decode())):
            log.error("%s: %s", command, failure)
    else:
        raise ValueError(f"unknown command {command!r} from rank 0: do all ranks run the same version of Foray?")
