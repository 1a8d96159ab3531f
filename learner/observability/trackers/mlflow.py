"""MLflow: a server, or an sqlite file in the run directory. Credentials come from MLflow's environment variables."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from learner.config.trackers import MLFLOW_URI, MlflowSettings
from learner.observability.trackers.base import COLUMNS, LAGS, TABLE, RunInfo, StepDetail, require_package

TAG = "foray.run"
MAX_PARAMS, MAX_METRICS = 100, 1000
"""Limits of one `log_batch` (MLflow's REST API)."""


class MlflowTracker:
    """A resumed learner finds its MLflow run by a tag. MLflow keeps both values of a step that was logged twice, with
    their times, and shows the later one.
    """

    name = "mlflow"

    def __init__(self, settings: MlflowSettings) -> None:
        for module in settings.modules:
            require_package(module, "mlflow")
        self._mlflow = require_package("mlflow", "mlflow")
        self._entities = require_package("mlflow.entities", "mlflow")
        self._client: Any = None
        self._run_id = ""

    def open(self, facts: RunInfo) -> None:
        """Find or create experiment and run."""
        facts.directory.mkdir(parents=True, exist_ok=True)
        uri = os.environ.get(MLFLOW_URI) or f"sqlite:///{(facts.directory / 'mlflow.db').resolve()}"
        client = self._mlflow.MlflowClient(tracking_uri=uri)
        experiment = client.get_experiment_by_name(_experiment())
        number = self._create_experiment(client, facts) if experiment is None else experiment.experiment_id
        found = client.search_runs([number], f"tags.`{TAG}` = '{facts.id}'", max_results=1)
        if found:
            self._run_id = found[0].info.run_id
            client.update_run(self._run_id, status="RUNNING")
        else:
            self._run_id = client.create_run(number, run_name=facts.id, tags={TAG: facts.id}).info.run_id
            self._log_config(client, facts)
        self._client = client

    def _create_experiment(self, client: Any, facts: RunInfo) -> str:
        """Create the experiment. Without a server its artifacts are in the run directory, not in the current one."""
        local = None if os.environ.get(MLFLOW_URI) else (facts.directory / "mlartifacts").resolve().as_uri()
        return str(client.create_experiment(_experiment(), artifact_location=local))

    def _log_config(self, client: Any, facts: RunInfo) -> None:
        params = [self._entities.Param(name, str(value)[:500]) for name, value in facts.config.items()]
        for start in range(0, len(params), MAX_PARAMS):
            client.log_batch(self._run_id, params=params[start : start + MAX_PARAMS])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the step in one request."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, value, now, step) for name, value in values.items()]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=metrics[start : start + MAX_METRICS])

    def show(self, step: int, detail: StepDetail, rows: int) -> None:
        """Log the share of tokens with each lag as metrics, since MLflow has no histograms, and the table."""
        total = sum(detail.lags.values())
        self.log(step, {f"{LAGS}/{lag}": tokens / total for lag, tokens in sorted(detail.lags.items())})
        if rows:
            columns = zip(*detail.rows(rows), strict=True)
            data = {name: list(cells) for name, cells in zip(COLUMNS, columns, strict=False)}
            self._client.log_table(self._run_id, data=data, artifact_file=f"{TABLE}.json")

    def close(self) -> None:
        """Mark the run as finished; a resume reopens it."""
        self._client.set_terminated(self._run_id)


def _experiment() -> str:
    return os.environ.get("MLFLOW_EXPERIMENT_NAME") or "foray"
