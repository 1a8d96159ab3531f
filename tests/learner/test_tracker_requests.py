"""What trackers send to doubles of MLflow, W&B and Trackio: `test_trackers.py` has the real ones where installed."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.config.trackers import MlflowSettings, TrackioSettings, WandbSettings
from learner.observability.trackers import build_tracker
from learner.observability.trackers.base import COLUMNS, RunInfo, StepDetail, histogram_of
from protocol.errors import UserError

ROWS = [[1, seq, "q", "a", "a", 1.0, "answered", 2, 1, 0, "text"] for seq in (1, 2, 3)]
DETAIL = StepDetail({0: 6, 2: 2}, lambda count: ROWS[:count])
WITHOUT = StepDetail({}, lambda count: ROWS[:count])


class Mlflow:
    """One server. `batches`: the sizes of its requests; MLflow refuses more than 100 parameters or 1000 metrics."""

    def __init__(self) -> None:
        self.uris: list[str] = []
        self.experiments: dict[str, str | None] = {}
        self.runs: list[SimpleNamespace] = []
        self.batches: list[tuple[int, int]] = []
        self.tables: list[tuple[str, dict[str, list[Any]], str]] = []

    def client(self, tracking_uri: str) -> Mlflow:
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name: str) -> Any:
        return SimpleNamespace(experiment_id=f"id of {name}") if name in self.experiments else None

    def create_experiment(self, name: str, artifact_location: str | None) -> str:
        assert name not in self.experiments
        self.experiments[name] = artifact_location
        return f"id of {name}"

    def search_runs(self, numbers: list[str], query: str, max_results: int) -> list[Any]:
        assert all(number.startswith("id of ") for number in numbers)
        name, _, value = query.removeprefix("tags.`").partition("` = ")
        return [run for run in self.runs if run.tags.get(name) == value.strip("'")][:max_results]

    def create_run(self, number: str, run_name: str, tags: dict[str, str]) -> Any:
        info = SimpleNamespace(run_id=f"run {len(self.runs)}", status="RUNNING")
        self.runs.append(SimpleNamespace(info=info, name=run_name, tags=tags, params=[], metrics=[]))
        return self.runs[-1]

    def _run(self, run_id: str) -> Any:
        return next(run for run in self.runs if run.info.run_id == run_id)

    def update_run(self, run_id: str, status: str) -> None:
        self._run(run_id).info.status = status

    def set_terminated(self, run_id: str) -> None:
        self._run(run_id).info.status = "FINISHED"

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(params) <= 100 and len(metrics) <= 1000, "refused"
        self.batches.append((len(params), len(metrics)))
        self._run(run_id).params += params
        self._run(run_id).metrics += metrics

    def log_table(self, run_id: str, data: dict[str, list[Any]], artifact_file: str) -> None:
        self.tables.append((run_id, data, artifact_file))


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mlflow]:
    server = Mlflow()
    entities = SimpleNamespace(Param=lambda *given: given, Metric=lambda *given: given)
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(MlflowClient=server.client))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)  # type: ignore[arg-type]
    for name in ("sqlalchemy", "alembic"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())  # type: ignore[arg-type]
    yield server


def facts_of(directory: Path, count: int = 250) -> RunInfo:
    return RunInfo("run-7", directory, 1, {f"p{number}": number for number in range(count)} | {"long": "x" * 600})


def test_mlflow_gets_every_parameter_and_number_in_requests_that_it_accepts(
    mlflow: Mlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://h:5000")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "e")
    tracker = build_tracker(MlflowSettings())
    tracker.open(facts_of(tmp_path / "runs" / "new"))
    assert (tmp_path / "runs" / "new").is_dir()
    (run,) = mlflow.runs
    assert run.params == [*((f"p{number}", str(number)) for number in range(250)), ("long", "x" * 500)]
    assert mlflow.batches == [(100, 0), (100, 0), (51, 0)]
    began = time.time() * 1000
    tracker.log(4, {f"m{number}": number / 2 for number in range(2001)})
    assert [(name, value, step) for name, value, _, step in run.metrics] == [
        (f"m{number}", number / 2, 4) for number in range(2001)
    ]
    assert all(began - 1 <= now <= time.time() * 1000 for _, _, now, _ in run.metrics), "in milliseconds"
    assert mlflow.batches[3:] == [(0, 1000), (0, 1000), (0, 1)]
    assert (mlflow.uris, mlflow.experiments) == (["http://h:5000"], {"e": None})
    assert (run.name, run.info.status) == ("run-7", "RUNNING")
    tracker.close()
    assert run.info.status == "FINISHED"


def test_mlflow_needs_what_a_local_database_needs_only_without_a_server(
    mlflow: Mlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "alembic", None)
    with pytest.raises(UserError) as refused:
        build_tracker(MlflowSettings())
    assert "pip install mlflow" in refused.value.todo
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://h:5000")
    build_tracker(MlflowSettings())


def test_mlflow_shows_shares_of_lags_and_a_table_if_rows_are_wanted(mlflow: Mlflow, tmp_path: Path) -> None:
    tracker = build_tracker(MlflowSettings())
    tracker.open(facts_of(tmp_path, 0))
    tracker.show(2, DETAIL, 0)
    tracker.show(3, WITHOUT, 2)
    (run,) = mlflow.runs
    assert [(name, value, step) for name, value, _, step in run.metrics] == [
        ("token_lag/0", 0.75, 2), ("token_lag/2", 0.25, 2),
    ]  # fmt: skip
    ((run_id, data, name),) = mlflow.tables
    assert (run_id, name) == (run.info.run_id, "trajectories.json")
    assert data == {column: [row[at] for row in ROWS[:2]] for at, column in enumerate(COLUMNS)}
    assert mlflow.uris == [f"sqlite:///{tmp_path.resolve()}/mlflow.db"]
    assert mlflow.experiments == {"foray": (tmp_path / "mlartifacts").resolve().as_uri()}


def test_a_resumed_run_goes_on_in_mlflow_without_a_second_configuration(
    mlflow: Mlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "u")
    mlflow.create_experiment("foray", None)
    mlflow.create_run("id of foray", "another", {"foray.run": "run-6"})
    for step in (1, 2):
        tracker = build_tracker(MlflowSettings())
        tracker.open(facts_of(tmp_path, 10))
        assert [run.info.status for run in mlflow.runs] == ["RUNNING", "RUNNING"]
        tracker.log(step, {"loss": 1.0})
        tracker.close()
    other, run = mlflow.runs
    assert len(run.params) == 11 and [step for *_, step in run.metrics] == [1, 2]
    assert not other.metrics and (other.info.status, run.info.status) == ("RUNNING", "FINISHED")


class Recorded:
    """A run of W&B or Trackio."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.defined: list[tuple[tuple[str, ...], dict[str, str]]] = []
        self.records: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.finished = 0

    def init(self, **given: Any) -> Recorded:
        self.given = given
        return self

    def define_metric(self, *names: str, **more: str) -> None:
        self.defined.append((names, more))

    def log(self, values: dict[str, Any], **more: Any) -> None:
        self.records.append((values, more))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """The run that W&B and Trackio make."""
    run = Recorded()
    made: dict[str, Any] = {"init": run.init, "Settings": lambda **given: given}
    made |= {"Histogram": lambda np_histogram: np_histogram, "Table": lambda **given: given}
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(**made))  # type: ignore[arg-type]
    frames = SimpleNamespace(DataFrame=lambda rows, columns: (rows, columns))
    monkeypatch.setitem(sys.modules, "pandas", frames)  # type: ignore[arg-type]
    return run


def test_wandb_continues_the_run_of_this_id_and_keeps_steps_as_a_metric(recorded: Recorded, tmp_path: Path) -> None:
    tracker = build_tracker(WandbSettings(project="p"))
    facts = facts_of(tmp_path / "runs" / "new", 1)
    tracker.open(facts)
    settings = recorded.given.pop("settings")
    assert settings == {"console": "off", "silent": True, "init_timeout": 20.0}
    assert recorded.given == {
        "project": "p", "id": "run-7", "name": "run-7", "resume": "allow",
        "dir": str(tmp_path / "runs" / "new"), "config": dict(facts.config),
    }  # fmt: skip
    assert recorded.defined == [(("step",), {}), (("*",), {"step_metric": "step"})] and facts.directory.is_dir()
    tracker.log(3, {"loss": 0.5})
    tracker.show(3, DETAIL, 0)
    tracker.show(4, WITHOUT, 2)
    table = {"columns": list(COLUMNS), "data": ROWS[:2]}
    assert [values for values, _ in recorded.records] == [
        {"loss": 0.5, "step": 3}, {"step": 3, "token_lag": histogram_of(DETAIL.lags)},
        {"step": 4, "trajectories": table},
    ]  # fmt: skip
    tracker.close()
    assert recorded.finished == 1
    resumed = build_tracker(WandbSettings(project="p"))
    resumed.open(facts)
    assert (recorded.given["id"], recorded.given["resume"]) == ("run-7", "allow")


def test_trackio_continues_the_record_of_this_name(recorded: Recorded, tmp_path: Path) -> None:
    tracker = build_tracker(TrackioSettings(project="p"))
    facts = facts_of(tmp_path, 1)
    tracker.open(facts)
    assert recorded.given == {
        "project": "p", "name": "run-7", "resume": "allow", "config": dict(facts.config),
        "embed": False, "auto_log_gpu": False,
    }  # fmt: skip
    tracker.log(3, {"loss": 0.5})
    tracker.show(3, DETAIL, 0)
    tracker.show(4, WITHOUT, 2)
    tracker.show(5, WITHOUT, 0)
    table = {"dataframe": (ROWS[:2], list(COLUMNS))}
    assert recorded.records == [
        ({"loss": 0.5}, {"step": 3}), ({"token_lag": histogram_of(DETAIL.lags)}, {"step": 3}),
        ({"trajectories": table}, {"step": 4}),
    ]  # fmt: skip
    tracker.close()
    assert recorded.finished == 1


@pytest.mark.parametrize(
    ("lags", "counts", "edges"),
    [({}, [0], [-0.5, 0.5]), ({0: 3}, [3], [-0.5, 0.5]), ({3: 1, 1: 2}, [0, 2, 0, 1], [-0.5, 0.5, 1.5, 2.5, 3.5])],
)
def test_the_bins_of_lags_begin_at_zero(lags: dict[int, int], counts: list[int], edges: list[float]) -> None:
    assert histogram_of(lags) == (counts, edges)
