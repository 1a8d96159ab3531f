"""One trainer on several ranks: rank 0 commands, the others follow, and no rank waits for one that is gone.

The processes are this file, started by torchrun or by themselves; what they found they write as JSON.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from learner.algorithms import build_algorithm
from learner.background_call import BackgroundCall
from learner.config.algorithm import GrpoSettings
from learner.config.learner import BatchSettings
from learner.config.model import DeepSpeedSettings, OptimSettings
from learner.data.batch import MicroBatch, RankBatch, build_batch
from learner.engine import DeepSpeedEngine, join_ranks, leave_ranks
from learner.trainer.distributed import worker
from learner.trainer.distributed.channel import RankChannel, RankLost, decode, encode
from learner.trainer.distributed.leader import LeaderEngine, lead, run_follower
from protocol.errors import UserError
from protocol.versions import PolicyVersion
from tests.support.waiting import wait_until

if TYPE_CHECKING:  # torchrun runs this file too, and knows no folder but this one
    from tests.support.forks import Zygote

pytestmark = pytest.mark.timeout(300)

ROWS = 8


def micro_batch(seed: int) -> MicroBatch:
    rng = np.random.default_rng(seed)
    values = {
        field.name: rng.integers(0, 9, (2, 3) if field.name in ("ids", "positions", "document_ids") else 4)
        for field in dataclasses.fields(MicroBatch)
    }
    for name in ("behaviour", "advantages", "token_weights", "rewards", "answer"):
        values[name] = rng.standard_normal(4).astype(np.float32)
    return MicroBatch(**values)


def share(seed: int = 0) -> RankBatch:
    parts = ((micro_batch(seed), micro_batch(seed + 1)), (micro_batch(seed + 2),), ())
    return RankBatch(parts, 0.7, 12, {"packing": 0.5, "groups": 3.0})


# ---- shares as bytes


def test_a_share_survives_the_way() -> None:
    sent = share()
    got = decode(encode(sent), RankBatch)
    assert (got.temperature, got.num_tokens, got.stats) == (sent.temperature, sent.num_tokens, sent.stats)
    assert [len(part) for part in got.minibatches] == [2, 1, 0]
    for there, here in zip(
        (m for part in got.minibatches for m in part), (m for part in sent.minibatches for m in part), strict=True
    ):
        for field in dataclasses.fields(MicroBatch):
            found, expected = getattr(there, field.name), getattr(here, field.name)
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)
            found[...] = 0  # torch warns of arrays that cannot be written to


def test_integers_travel_in_the_narrowest_dtype() -> None:
    def sent(values: list[int]) -> int:
        one = dataclasses.replace(micro_batch(0), lags=np.array(values, np.int64))
        share = RankBatch(((one,),), 1.0, 1, {})
        (got,) = decode(encode(share), RankBatch).minibatches[0]
        assert got.lags.dtype == np.int64 and got.lags.tolist() == values and got.behaviour.dtype == np.float32
        return len(encode(share))

    empty = sent([])
    per_value = {most: (sent([-1, most] * 100) - empty) // 200 for most in (127, 32767, 2**31 - 1, 2**31)}
    assert per_value == {127: 1, 32767: 2, 2**31 - 1: 4, 2**31: 8}


def test_a_share_is_less_than_half_of_what_it_is_in_memory() -> None:
    from tests.support.messages import make_group

    groups = [make_group(s, (1.0, 0.0, 0.5), length=600) for s in range(1, 9)]
    batch = build_batch(
        groups,
        build_algorithm(GrpoSettings()),
        now_step=0,
        lineage=[PolicyVersion(1, 0)],
        max_lag=2,
        settings=BatchSettings(row_tokens=2048, micro_batch_tokens=4096),
        temperature=1.0,
        ranks=2,
    )
    fields = [f.name for f in dataclasses.fields(MicroBatch)]
    held = sum(getattr(m, name).nbytes for m in batch.micro_batches for name in fields)
    assert sum(len(encode(share)) for share in batch.rank_batches) < held / 2


def test_a_share_of_other_code_is_refused() -> None:
    first = share().minibatches[0][0]
    wide = dataclasses.replace(first, token_weights=first.token_weights.astype(np.float64))
    with pytest.raises(TypeError, match=r"RankBatch.minibatches\[0\]\[0\].token_weights should be"):
        encode(RankBatch(((wide,),), 1.0, 1, {}))
    with pytest.raises(TypeError, match=r"RankBatch\.num_tokens should be int, not float"):
        encode(RankBatch((), 1.0, 1.0, {}))  # type: ignore[arg-type]

    @dataclasses.dataclass(frozen=True)
    class Older:
        temperature: float

    with pytest.raises(TypeError, match="should be RankBatch"):
        decode(encode(Older(1.0)), RankBatch)


# ---- a trainer of a toy, on ranks


@dataclasses.dataclass(frozen=True)
class Report:
    """As `learner.interfaces.StepReport`."""

    loss: float
    grad_norm: float
    skipped: bool
    tokens_trained: int
    reason: str = ""
    seconds: float = 0.0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


class ToyTrainer:
    """Enough of `learner.trainer.trainer.Trainer`: `num_tokens` of a share seeds the step's data, each takes rows."""

    algorithm = model_files = ()

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.engine = DeepSpeedEngine(
            torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1)),
            optim=OptimSettings(lr=0.05),
            engine=DeepSpeedSettings(
                zero_stage=3, deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}}
            ),
            dtype="float32",
            total_updates=10,
            seed=1,
        )
        self.rank, self.world_size = self.engine.rank, self.engine.world_size

    def rank_batches(self, batch: int) -> list[RankBatch]:
        return [dataclasses.replace(share(), num_tokens=batch) for _ in range(self.world_size)]

    def train(self, batch: int) -> Report:
        return self.train_rank_batch(self.rank_batches(batch)[self.rank])

    def train_rank_batch(self, share: RankBatch) -> Report:
        data = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(share.num_tokens))
        loss = (self.engine.forward(data[self.rank :: self.world_size]) - 1).square().sum() / ROWS
        self.engine.backward(loss)
        update = self.engine.step()
        total = float(self.engine.all_reduce(loss.detach()))
        return Report(total, update.grad_norm, not update.applied, share.num_tokens)

    def iter_weights(self, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.engine.iter_weights(device)

    def save_state(self, directory: Path) -> None:
        self.engine.save_state(directory)
        if (directory / "full").exists() and self.rank:
            raise OSError("no space left on device")

    def snapshot_state(self, directory: Path) -> Callable[[], None]:
        write = self.engine.snapshot_state(directory)

        def written() -> None:
            write()
            if (directory / "full").exists() and self.rank:
                raise OSError("no space left on device")

        return written

    def load_state(self, directory: Path) -> None:
        self.engine.load_state(directory)

    def close(self) -> None:
        self.engine.close()
        leave_ranks()


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a state."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def drive(engine: LeaderEngine | ToyTrainer, folder: Path) -> dict[str, object]:
    """A run in small, with failures in between; the same on one rank and on several."""
    found: dict[str, object] = {"losses": [engine.train(n).loss for n in (1, 2)]}
    for _ in engine.iter_weights():
        break  # an engine that publishes may fail: the others must not wait
    half = engine.iter_weights()
    next(half)
    engine.iter_weights()  # and never begun
    (folder / "state").mkdir()
    engine.save_state(folder / "state")
    (folder / "written").mkdir()
    write = BackgroundCall("checkpoint", engine.snapshot_state(folder / "written"))
    found["losses"] += [engine.train(n).loss for n in (3, 4)]
    write.result()
    found["same"] = content(folder / "written") == content(folder / "state")
    (folder / "bad").mkdir()
    (folder / "bad" / "full").touch()
    for call in (engine.save_state, engine.load_state):
        try:
            call(folder / "bad" if call == engine.save_state else folder / "nowhere")
        except (OSError, UserError) as error:
            found[call.__name__] = f"{type(error).__name__}: {error.args[0]}: {getattr(error, 'why', '')}"
    try:
        engine.snapshot_state(folder / "bad")()
    except OSError as error:
        found["snapshot"] = str(error)
    engine.load_state(folder / "state")
    found["again"] = [engine.train(n).loss for n in (3, 4)]
    found["weights"] = {name: t.flatten().tolist() for name, t in engine.iter_weights()}
    return found


def role_toy(folder: Path) -> None:
    trainer = ToyTrainer()
    if trainer.rank:
        run_follower(trainer)
        (folder / "followed").touch()
        return
    engine = lead(trainer)
    assert isinstance(engine, LeaderEngine)
    found = drive(engine, folder)
    engine.close()
    (folder / "found.json").write_text(json.dumps(found))


@pytest.mark.slow
def test_a_trainer_over_ranks_looks_like_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, __file__, "toy", str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "followed").exists()
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["again"] == found["losses"][2:], "the state is the one that was saved"
    assert found["save_state"] == "OSError: rank 1: no space left on device: "
    assert found["snapshot"] == "rank 1: no space left on device" and found["same"]
    assert found["load_state"].startswith("UserError: cannot load the saved state in")
    assert "rank 0: " in found["load_state"] and "rank 1: " in found["load_state"]
    (tmp_path / "one").mkdir()
    trainer = ToyTrainer()
    alone = drive(trainer, tmp_path / "one")
    trainer.engine.close()
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert found["weights"].keys() == alone["weights"].keys()
    for name, values in alone["weights"].items():
        assert found["weights"][name] == pytest.approx(values, rel=1e-4, abs=1e-6)


# ---- a rank dies; no DeepSpeed, only the channel


def role_mortal(folder: Path) -> None:
    """Rank `die` ends abruptly on command; the others report how they detect it."""
    join_ranks()
    ranks, die = RankChannel(), int(os.environ["DIE"])
    (folder / f"up{ranks.rank}").touch()
    try:
        if ranks.rank == 0:
            ranks.send("work", [b"", b"for one", b"for two"][: ranks.size])
            assert ranks.gather_errors(True) == [f"rank {ranks.size - 1}: cannot"]
            while not (folder / "now").exists():
                time.sleep(0.02)
            if die == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                ranks.send("more")
                ranks.gather_errors(True)
        while True:
            command, payload = ranks.receive()
            if command == "work":
                assert payload == {1: b"for one", 2: b"for two"}[ranks.rank]
                ranks.gather_errors(ranks.rank < ranks.size - 1, "cannot")
                (folder / f"worked{ranks.rank}").touch()
            elif die == ranks.rank:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                ranks.gather_errors(True)
    except RankLost as error:
        (folder / f"lost{ranks.rank}").write_text(str(error))


@pytest.mark.fault(12)
@pytest.mark.parametrize(("size", "die"), [(2, 0), (3, 1)])
def test_a_rank_that_dies_takes_the_others_down_at_once(size: int, die: int, tmp_path: Path, zygote: Zygote) -> None:
    with zygote.ranks(__file__, ["mortal", str(tmp_path)], tmp_path, size, {"DIE": str(die)}) as ranks:
        wait_until(
            lambda: all((tmp_path / f"worked{rank}").exists() for rank in range(1, size)), "every rank works", 90
        )
        assert all(zygote.ended(rank) is None for rank in ranks), "an idle rank waits"
        (tmp_path / "now").touch()
        for rank in ranks:
            zygote.wait(rank, 30)
    lost = {rank for rank in range(size) if (tmp_path / f"lost{rank}").exists()}
    assert lost == set(range(size)) - {die}
    for rank in lost:
        assert "another rank is gone" in (tmp_path / f"lost{rank}").read_text()


# ---- the folder that all ranks share


def role_folders(folder: Path) -> None:
    """One shared folder, then one for each rank."""
    join_ranks()
    rank = torch.distributed.get_rank()
    worker.VISIBLE_S = 0.3
    measured = ("bfloat16", "float32")[rank]  # two measurements of one CPU may differ
    assert worker.require_shared_folder(folder / "shared", measured) == "bfloat16"
    try:
        (folder / f"own{rank}").mkdir()
        worker.require_shared_folder(folder / f"own{rank}")
    except UserError as error:
        (folder / f"refused{rank}").write_text(error.render())
    (folder / f"left{rank}").write_text(str(len([*folder.glob("*/.probe*")])))


@pytest.mark.fault(62)
def test_ranks_without_a_shared_folder_are_refused_at_the_start(tmp_path: Path, zygote: Zygote) -> None:
    zygote.run_ranks(__file__, ["folders", str(tmp_path)], tmp_path, 2)
    for rank in (0, 1):
        said = (tmp_path / f"refused{rank}").read_text()
        assert "do not share the folder" in said and f"rank 1: {tmp_path / 'own1'} is not the folder of rank 0" in said
        assert "run.dir" in said and (tmp_path / f"left{rank}").read_text() in "01"
    assert not [*tmp_path.glob("*/.probe*")]


def test_rank_0_removes_the_file_that_all_ranks_have_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = SimpleNamespace(rank=0, send=lambda name: None, gather_errors=lambda ok, text: [] if ok else [text])
    monkeypatch.setattr("learner.engine.ranks.join_ranks", lambda: None)
    monkeypatch.setattr("learner.trainer.distributed.channel.RankChannel", lambda: alone)
    worker.require_shared_folder(tmp_path / "shared")
    assert not [*(tmp_path / "shared").iterdir()]


def without_a_port() -> None:
    """Join through a file: no port to collide on."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = torch.distributed.FileStore(os.environ["FORAY_STORE"], size)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=2))


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "FORAY_STORE" in os.environ:
        without_a_port()
    {"toy": role_toy, "mortal": role_mortal, "folders": role_folders}[sys.argv[1]](Path(sys.argv[2]))
