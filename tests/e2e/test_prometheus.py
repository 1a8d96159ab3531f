"""The Grafana dashboard's expressions and the recording rules, asked of a Prometheus that scrapes a demo's ring."""

from __future__ import annotations

import json
import math
import shutil
import signal
import socket
import subprocess
import sys
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import yaml

from deploy.run.run_dir import read_record
from foray.cli import main as foray
from foray.watch.grafana import INTERVAL, RULES, dashboard
from tests.support.waiting import wait_until

SMALL = ("run.steps=100000", "run.groups_per_step=4", "run.group_size=4", "learner.checkpoint_every=10")
WITHOUT = {
    "foray_learner_validation": "learner.eval is off in the demo",
    "foray_learner_kl_reference": "the demo has no reference policy",
}
"""Metric -> why a ring of the demo does not have it."""


@contextmanager
def running(arguments: list[str], folder: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process until the end of the block, then interrupt it."""
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(arguments, cwd=folder, stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT if name == "up" else signal.SIGTERM)
            process.wait(60)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def ask(url: str, expression: str) -> list[float]:
    """The values that Prometheus gives for an expression now, without NaN."""
    query = urllib.parse.urlencode({"query": expression})
    with urllib.request.urlopen(f"{url}/api/v1/query?{query}", timeout=10) as answer:
        found = json.load(answer)
    assert found["status"] == "success", found
    return [v for series in found["data"]["result"] if not math.isnan(v := float(series["value"][1]))]


def expressions(run: str) -> dict[str, str]:
    """Panel and number, or name of a recording rule -> expression as Grafana sends it."""
    found = {
        f"{panel['title']}, {target['refId']}": target["expr"].replace(INTERVAL, "[15s]").replace("$run", run)
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    }
    (records, _) = yaml.safe_load(RULES.read_text())["groups"]
    return found | {rule["record"]: f"{rule['record']}{{run='{run}'}}" for rule in records["rules"]}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_expression_has_data_in_a_live_prometheus(tmp_path: Path, warm_model: Path) -> None:
    prometheus = shutil.which("prometheus")
    if prometheus is None:
        pytest.skip("prometheus is not installed (Debian: prometheus)")
    run_dir, out, port = tmp_path / "run", tmp_path / "monitoring", free_port()
    assert foray(["demo", "--prepare-only", "--dir", str(run_dir), "--model", str(warm_model), *SMALL]) == 0
    with ExitStack() as stack:
        up = [sys.executable, "-m", "foray", "up", str(run_dir / "demo.yaml")]
        launched = stack.enter_context(running(up, tmp_path, "up"))
        wait_until(lambda: read_record(run_dir).get("state") == "running" or launched.poll() is not None, "up", 120)
        assert launched.poll() is None, (tmp_path / "up.log").read_text()
        assert foray(["grafana", str(run_dir), "--out", str(out)]) == 0
        config = yaml.safe_load((out / "prometheus.yml").read_text())
        jobs = {job["job_name"] for job in config["scrape_configs"]}
        assert jobs == {"foray-learner", "foray-rollout", "foray-retriever", "foray-engine"}
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "2s"}
        (out / "prometheus.yml").write_text(yaml.safe_dump(config))
        address = f"127.0.0.1:{port}"
        files = [f"--config.file={out}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/tsdb"]
        stack.enter_context(running([prometheus, *files, f"--web.listen-address={address}"], tmp_path, "prometheus"))
        asked = expressions(yaml.safe_load((run_dir / "demo.yaml").read_text())["run"]["id"])
        without = {where for where, text in asked.items() if any(name in text for name in WITHOUT)}
        missing = set(asked)

        def complete() -> bool:
            try:
                missing.difference_update([where for where in missing if ask(f"http://{address}", asked[where])])
            except OSError:  # it does not listen yet
                return False
            return missing <= without

        said = "\n".join
        wait_until(
            complete, "every expression has data", 150, lambda: said(f"{w}: {asked[w]}" for w in sorted(missing))
        )
        assert missing == without, "what the demo does not have"
        assert len(asked) > 70 and len(without) == 2
        assert ask(f"http://{address}", "count(up == 1)") == [4.0]
