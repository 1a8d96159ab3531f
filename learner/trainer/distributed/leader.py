"""A trainer on several ranks that looks like one: rank 0 has the loop, the others follow its commands.

rank 0   LeaderEngine: rank_batches of a batch out, the same call here and there, then whether all succeeded
others   follow: one command after the other

Only rank 0 knows of Redis, batches and the delivery state. Checkpoint folders must be visible to every rank.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from learner.data.batch import AdvantageEstimator, Batch, RankBatch
from learner.interfaces import StepReport, TrainEngine
from learner.trainer.distributed.channel import RankChannel, decode, encode, others_alive
from protocol.errors import UserError

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

LEARN, WEIGHTS, SAVE, LOAD, CLOSE = "learn", "weights", "save", "load", "close"
NOWHERE = "meta"
"""Device of the weights that only rank 0 wants: their copies take no memory."""


class SharedTrainer(TrainEngine, Protocol):
    """What `learner.trainer.trainer.Trainer` offers to be run on several ranks; what computes is collective."""

    @property
    def world_size(self) -> int: ...

    def rank_batches(self, batch: Batch) -> list[RankBatch]:
        """Return what each rank is to `train_rank_batch`."""
        ...

    def train_rank_batch(self, rank_batch: RankBatch) -> StepReport:
        """One training step, of which this rank has `rank_batch`."""
        ...


class LeaderEngine:
    """`learner.interfaces.TrainEngine` on rank 0. All calls come from one thread.

    A call that fails on any rank for want of a disk or for a damaged file fails here, on all ranks in step, and the
    engine can be used on. Anything else that goes wrong leaves ranks in different places: then `close` sends nothing,
    and the others end when they find their connections closed.
    """

    def __init__(self, trainer: SharedTrainer, ranks: RankChannel) -> None:
        self._trainer, self._ranks = trainer, ranks
        self._sending: Iterator[tuple[str, torch.Tensor]] | None = None
        self._in_step = True

    @property
    def algorithm(self) -> AdvantageEstimator:
        """What `build_batch` asks for advantages."""
        return self._trainer.algorithm

    @property
    def model_files(self) -> Sequence[Path]:
        """Configuration and tokenizer of the policy."""
        return self._trainer.model_files

    def train(self, batch: Batch) -> StepReport:
        """One optimiser step, each rank with its share."""
        rank_batches = self._trainer.rank_batches(batch)
        self._begin(LEARN, [encode(rank_batch) for rank_batch in rank_batches])
        with others_alive("the step"):
            report = self._trainer.train_rank_batch(rank_batches[0])
        self._in_step = True
        return report

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """As a trainer's. What is not consumed is gathered all the same, since the other ranks take part in it."""
        self._begin(WEIGHTS)
        self._sending = self._trainer.iter_weights(device)
        return self._weights(self._sending)

    def _weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            with others_alive("gathering the weights"):
                for pair in weights:  # noqa: UP028  # `yield from` would close `weights` together with us
                    yield pair
        except GeneratorExit:
            if self._sending is weights:
                self._drain()
            raise
        if self._sending is weights:
            self._sending, self._in_step = None, True

    def save_state(self, directory: Path) -> None:
        """Every rank writes its part into `directory`. Raises OSError when one of them could not."""
        self._together(SAVE, directory, self._trainer.save_state)

    def load_state(self, directory: Path) -> None:
        """Every rank reads what it needs. Raises UserError when one of them could not."""
        self._together(LOAD, directory, self._trainer.load_state)

    def close(self) -> None:
        """End the other ranks too, where they can still hear."""
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
                f"the saved state in {directory} cannot be taken up",
                why="; ".join(failures),
                todo="every rank must see the checkpoint folder; restore the file, or resume from an older checkpoint",
            )


def _attempt(ranks: RankChannel, call: Callable[[Path], None], directory: Path) -> list[str]:
    """Call, and exchange with the others how it went. Return the failures of all ranks, in words."""
    try:
        with others_alive(f"the state in {directory}"):
            call(directory)
    except UserError as error:
        return ranks.gather_errors(False, f"{error.what}: {error.why}")
    except OSError as error:
        return ranks.gather_errors(False, str(error))
    return ranks.gather_errors(True)


def lead(trainer: SharedTrainer) -> TrainEngine:
    """Return what the loop on rank 0 is given: the trainer itself where it is alone. Collective with `run_follower`."""
    return LeaderEngine(trainer, RankChannel()) if trainer.world_size > 1 else trainer


def run_follower(trainer: SharedTrainer) -> None:
    """Follow the commands of rank 0. Raises RankLost if rank 0 ends without a word."""
    follow(trainer, RankChannel())


def follow(trainer: SharedTrainer, ranks: RankChannel) -> None:
    """Run the commands of rank 0 until it says `close`.

    consumes      commands of rank 0, with this rank's share of a batch or the name of a folder
    produces      its part in collectives, its files of a checkpoint, and for each of those how it went
    waits for     the next command, as long as it takes
    unblocked by  the command `close`, or the end of rank 0 (RankLost)
    """
    while True:
        command, payload = ranks.receive()
        if command == CLOSE:
            trainer.close()
            return
        with others_alive(command):
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
        raise ValueError(f"rank 0 says {command!r}, which this rank does not know: not the same version of Foray?")
