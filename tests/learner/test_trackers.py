"""Trackers: the real packages where they are installed, and that none of them stops or delays training."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from learner.config.learner import LearnerSettings
from learner.config.trackers import MlflowSettings, TensorBoardSettings, TrackerSettings, WandbSettings
from learner.observability.reporting import open_trackers
from learner.observability.trackers import build_tracker
from learner.observability.trackers import fanout as fan
from learner.observability.trackers.base import COLUMNS, RunInfo, StepDetail, Tracker, decoder, table_rows
from learner.observability.trackers.fanout import Trackers
from protocol.errors import UserError
from protocol.runtime.config import section
from protocol.settings import RunSettings, Settings
from protocol.versions import PolicyVersion
from rollout_server.environment.tokenizer import load_tokenizer
from tests.support import tiny_learner
from tests.support.environments import write_tokenizer
from tests.support.messages import make_group

VALUES = {"step": 1, "loss": 0.5, "seqs": [1, 2], "seconds": {"wait": 0.25}, "broken": float("nan"), "ok": True}


class Section(Settings):
    trackers: tuple[TrackerSettings, ...] = ()
    lr: float = 1e-3


def facts_of(directory: Path, *, first_step: int = 1, epoch: int = 1) -> RunInfo:
    run = RunSettings(id="run-7", dir=directory, redis_url="redis://:geheim@host:1/0")
    return RunInfo.of(run, Section(), first_step=first_step, epoch=epoch)


GROUPS = [make_group(seq, (1.0, 0.0), version=PolicyVersion(1, 3 - seq)) for seq in (1, 2)]
LAGS = {0: 8, 1: 8}
"""Tokens of the two groups by lag: each has two trajectories of four tokens."""


def detail_of(step: int) -> StepDetail:
    return StepDetail(LAGS, lambda count: table_rows(GROUPS, step, 2, decoder(Path("no-model")), count))


def log_steps(tracker: Tracker, facts: RunInfo, *steps: int) -> None:
    """As a learner that begins with `facts` and ends after `steps`; nothing may be lost."""
    trackers = Trackers([tracker], facts, [(2, 3)])
    for step in steps:
        trackers.log(step, VALUES | {"loss": step + facts.first_step / 100}, detail_of(step))
    trackers.close(60.0)
    assert trackers.dropped == 0


class Broken:
    name = "broken"

    def __init__(self, *, at: str, hold: threading.Event | None = None) -> None:
        self.at, self.hold, self.seen, self.shown, self.closed = at, hold, [], [], False

    def _maybe(self, where: str) -> None:
        if self.at == where and self.hold is not None:
            self.hold.wait(30)
        elif self.at == where:
            raise OSError("No space left on device")

    def open(self, facts: RunInfo) -> None:
        self._maybe("open")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._maybe("log")
        self.seen.append((step, dict(values)))

    def show(self, step: int, detail: StepDetail, rows: int) -> None:
        self._maybe("show")
        self.shown.append((step, dict(detail.lags), detail.rows(rows)))

    def close(self) -> None:
        self._maybe("close")
        self.closed = True


def test_numbers_reach_a_tracker_in_order_and_flat_and_finite(tmp_path: Path) -> None:
    tracker = Broken(at="never")
    log_steps(tracker, facts_of(tmp_path), 1, 2, 3)
    assert [step for step, _ in tracker.seen] == [1, 2, 3] and tracker.closed
    assert tracker.seen[0][1] == {"loss": 1.01, "seconds/wait": 0.25}, "Trackio keeps `step` for itself"


def test_a_table_comes_every_so_many_steps_and_begins_with_each_group(tmp_path: Path) -> None:
    tracker = Broken(at="never")
    log_steps(tracker, facts_of(tmp_path), 1, 2, 3, 4)
    assert [(step, lags, len(rows)) for step, lags, rows in tracker.shown] == [
        *((1, LAGS, 0), (2, LAGS, 3), (3, LAGS, 0), (4, LAGS, 3))
    ]
    first, second, third = (dict(zip(COLUMNS, row, strict=True)) for row in tracker.shown[1][2])
    assert [(row["seq"], row["reward"], row["lag"]) for row in (first, second, third)] == [
        *((1, 1.0, 0), (2, 1.0, 1), (1, 0.0, 0))
    ]
    assert first["question"] == "what is fact 1 ?" and first["answers"] == "answer 1" and first["step"] == 2
    assert first["text"] == "1 2 3 4 5 6 7 8 9 10", "a model without a tokenizer: the ids"


def test_the_text_of_a_table_is_that_of_the_models_tokenizer(tmp_path: Path) -> None:
    model = write_tokenizer(tmp_path / "model", "words")
    ids = load_tokenizer(model).encode_trusted("<search> a b </search>")
    assert decoder(model)(ids).split() == ["<search>", "a", "b", "</search>"]


@pytest.mark.parametrize("at", ["open", "log", "show", "close"])
@pytest.mark.fault(46)
def test_a_tracker_that_fails_is_counted_said_once_and_stops_nothing(
    at: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken, sound = Broken(at=at), Broken(at="never")
    with caplog.at_level(logging.WARNING):
        trackers = Trackers([broken, sound], facts_of(tmp_path))
        for step in range(5):
            trackers.log(step, VALUES, detail_of(step))
        trackers.close()
    assert len(sound.seen) == 5 and sound.closed
    assert trackers.dropped == (0 if at == "close" else 5)
    assert caplog.text.count("No space left") == 1


@pytest.mark.fault(46)
def test_a_tracker_that_hangs_delays_neither_training_nor_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fan, "QUEUE_STEPS", 4)
    hold = threading.Event()
    tracker = Broken(at="log", hold=hold)
    trackers = Trackers([tracker], facts_of(tmp_path))
    for step in range(50):
        trackers.log(step, VALUES)  # would wait for `hold`, which nothing sets before the end
    assert 50 - 4 - 1 <= trackers.dropped <= 50 - 4, "all but those in the queue and the one in its hands"
    trackers.close(0.2)
    assert "abandoned" in caplog.text and not hold.is_set()
    hold.set()


@pytest.mark.fault(46)
def test_a_tracker_whose_service_comes_back_is_opened_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fan, "REOPEN_S", 0.0)
    tracker = Broken(at="open")
    trackers = Trackers([tracker], facts_of(tmp_path))
    trackers.log(1, VALUES)
    deadline = time.monotonic() + 10
    while trackers.dropped < 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    tracker.at = "never"
    trackers.log(2, VALUES)
    trackers.close()
    assert [step for step, _ in tracker.seen] == [2] and trackers.dropped == 1


def test_the_configuration_is_logged_without_the_redis_password(tmp_path: Path) -> None:
    config = facts_of(tmp_path).config
    assert config["run.id"] == "run-7" and config["learner.lr"] == 1e-3 and config["epoch"] == 1
    assert "geheim" not in json.dumps(dict(config))


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow", "trackio"])
def test_a_missing_package_is_answered_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = section({"learner": {"trackers": [{"type": name}]}}, "learner", Section).trackers[0]
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError) as caught:
        build_tracker(settings)
    assert f"pip install {name}" in caught.value.todo


def test_nothing_starts_when_one_of_two_packages_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    before = threading.active_count()
    with pytest.raises(UserError, match="wandb"):
        chosen = (TensorBoardSettings(), WandbSettings())
        open_trackers(RunSettings(dir=tmp_path), LearnerSettings(trackers=chosen), 0, 1)
    assert threading.active_count() == before and not list(tmp_path.iterdir())


def test_a_run_without_trackers_has_none_to_wait_for(tmp_path: Path) -> None:
    trackers = open_trackers(RunSettings(dir=tmp_path), LearnerSettings(), 0, 1)
    trackers.log(1, VALUES)
    trackers.close()
    assert trackers.dropped == 0


def test_an_unknown_tracker_is_refused_with_those_there_are() -> None:
    with pytest.raises(UserError, match=r"valid names: mlflow, tensorboard, trackio, wandb"):
        section({"learner": {"trackers": [{"type": "neptune"}]}}, "learner", Section)


def test_tensorboard_reads_back_what_survived_a_crash(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_steps(build_tracker(TensorBoardSettings()), facts_of(tmp_path), 1, 2, 3)
    log_steps(build_tracker(TensorBoardSettings()), facts_of(tmp_path, first_step=3, epoch=2), 3, 4)
    events = EventAccumulator(str(tmp_path / "tensorboard"), {"histograms": 0}).Reload()
    assert [(e.step, round(e.value, 2)) for e in events.Scalars("loss")] == [(1, 1.01), (2, 2.01), (3, 3.03), (4, 4.03)]
    assert [e.value for e in events.Scalars("seconds/wait")] == [0.25] * 4
    lags = events.Histograms("token_lag")
    assert [(e.step, e.histogram_value.num, e.histogram_value.bucket) for e in lags] == [
        (n, 16.0, [8.0, 8.0]) for n in (1, 2, 3, 4)
    ]
    tables = events.Tensors("trajectories/text_summary")
    assert [e.step for e in tables] == [2, 4] and b"what is fact 1 ?" in tables[0].tensor_proto.string_val[0]
    assert b"run-7" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]


def test_a_crashed_run_and_its_successor_are_one_curve_in_tensorboard(
    run: RunSettings, settings: LearnerSettings, serve: Callable[..., int], address: dict[str, Any]
) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def die(updates: int) -> None:
        if updates == 5:
            raise tiny_learner.Crash

    tracked = settings.model_copy(update={"trackers": (TensorBoardSettings(),)})
    with tiny_learner.Player(address, run.id):
        with pytest.raises(tiny_learner.Crash):
            serve(run, tracked, before=die)
        assert serve(run, tracked) == 0
    events = EventAccumulator(str(run.dir / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("epoch")] == [(s, 1 if s <= 3 else 2) for s in range(1, 9)]
    assert {"loss", "reward/em", "seconds/compute"} <= set(events.Tags()["scalars"])


@pytest.mark.filterwarnings("ignore")  # its own affairs
def test_mlflow_keeps_one_run_over_a_resume(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    log_steps(build_tracker(MlflowSettings()), facts_of(tmp_path), 1, 2, 3)
    log_steps(build_tracker(MlflowSettings()), facts_of(tmp_path, first_step=3, epoch=2), 3, 4)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("foray").experiment_id])
    assert run.info.status == "FINISHED" and run.data.params["run.id"] == "run-7"
    assert {m.step: m.value for m in client.get_metric_history(run.info.run_id, "token_lag/1")} == dict.fromkeys(
        (1, 2, 3, 4), 0.5
    )
    (written,) = (tmp_path / "mlartifacts").rglob("trajectories.json")
    table = json.loads(written.read_text())
    assert tuple(table["columns"]) == COLUMNS and not Path("mlruns").exists()
    assert [row[:2] for row in table["data"]] == [[2, 1], [2, 2], [2, 1], [4, 1], [4, 2], [4, 1]]
    history = [(m.step, round(m.value, 2)) for m in client.get_metric_history(run.info.run_id, "loss")]
    assert sorted(history) == [(1, 1.01), (2, 2.01), (3, 3.01), (3, 3.03), (4, 4.03)]


@pytest.mark.filterwarnings("ignore")  # its own affairs
def test_wandb_offline_writes_a_run_that_holds_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    log_steps(build_tracker(WandbSettings()), facts_of(tmp_path), 1, 2, 3)
    (file,) = (tmp_path / "wandb").glob("offline-run-*-run-7/run-run-7.wandb")
    assert [(n, round(v, 2)) for n, v in read_wandb(file, "loss")] == [(1, 1.01), (2, 2.01), (3, 3.01)]
    assert read_wandb(file, "token_lag.values") == [(1, [8, 8]), (2, [8, 8]), (3, [8, 8])]
    assert read_wandb(file, "token_lag.bins")[0] == (1, [-0.5, 0.5, 1.5])
    assert read_wandb(file, "trajectories.nrows") == [(2, 3)]
    ((_, path),) = read_wandb(file, "trajectories.path")
    (written,) = file.parent.glob(f"files/{path}")
    assert "what is fact 2 ?" in written.read_text()


def read_wandb(file: Path, name: str) -> list[tuple[int, Any]]:
    """(step, value) of every record in W&B's file: LevelDB's log format (blocks of 32 KiB) after 7 bytes of header."""
    from wandb.proto import wandb_internal_pb2

    data, at, body, found = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        body += data[at + 7 : at + 7 + length]
        at += 7 + length
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record.FromString(body)
            items = {item.key or ".".join(item.nested_key): item.value_json for item in record.history.item}
            found += [(int(items["step"]), json.loads(items[name]))] if name in items else []
            body = b""
    return found


def test_trackio_keeps_one_record_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    # its place is read from the environment when it is imported
    code = """
import sys, pathlib
sys.path.insert(0, sys.argv[2])
from learner.config.trackers import TrackioSettings
from learner.observability.trackers import build_tracker
from test_trackers import facts_of, log_steps
here = pathlib.Path(sys.argv[1])
log_steps(build_tracker(TrackioSettings()), facts_of(here), 1, 2, 3)
log_steps(build_tracker(TrackioSettings()), facts_of(here, first_step=3, epoch=2), 3, 4)
from trackio import SQLiteStorage
rows = SQLiteStorage.get_logs("foray", "run-7")
print(sorted({name for row in rows for name in row} - {"timestamp"}))
print([(row["step"], round(row["loss"], 2)) for row in rows if "loss" in row])
print([(row["step"], row["token_lag"]["values"]) for row in rows if "token_lag" in row])
tables = [row["trajectories"] for row in rows if "trajectories" in row]
print([len(table["_value"] if "_value" in table else table) for table in tables])
"""
    env = os.environ | {"TRACKIO_DIR": str(tmp_path / "trackio")}
    argv = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    names, losses, lags, tables = done.stdout.splitlines()[-4:]
    found = "['loss', 'seconds/wait', 'step', 'token_lag', 'trajectories']"
    assert names == found, "no __step: Trackio renames what has one of its own names"
    assert losses == "[(1, 1.01), (2, 2.01), (3, 3.01), (3, 3.03), (4, 4.03)]"
    assert lags == "[(1, [8, 8]), (2, [8, 8]), (3, [8, 8]), (3, [8, 8]), (4, [8, 8])]" and tables == "[3, 3]"
