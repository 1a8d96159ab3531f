"""The Grafana dashboard, the rules and the scrape configuration: names that exist, a layout, and promtool's verdict."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.pages.metrics import document
from foray.commands.watch import grafana as command
from foray.watch.grafana import INTERVAL, dashboard
from foray.watch.grafana import RULES as RULES_FILE
from protocol.errors import UserError
from tests.support.registered import registered

RULES: dict[str, Any] = yaml.safe_load(RULES_FILE.read_text())
UNIT_TESTS = Path(__file__).with_name("prometheus_rules_test.yml")
ROWS = re.compile(r"^\| `((?:foray_|sglang:)\w+)` \| (\w+) \|(?:([^|]*)\|)? ", re.MULTILINE)
METRIC = re.compile(r"(?<![\w:])((?:foray_|sglang:|run:)[\w:]+)\s*(\{[^}]*\})?")
OF_PROMETHEUS = {"run", "instance", "job", "le"}


@cache
def reference() -> dict[str, set[str]]:
    """Name of each series in docs/metrics.md -> its own labels."""
    found: dict[str, set[str]] = {}
    for name, kind, labels in ROWS.findall(document()):
        for series in [f"{name}_{part}" for part in ("bucket", "sum", "count")] if kind == "histogram" else [name]:
            found[series] = set(re.findall(r"`(\w+)`", labels))
    return found


def expressions() -> Iterator[tuple[str, str]]:
    """(where, expression) of the dashboard and the rules."""
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for group in RULES["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule["expr"]


def unknown(expression: str) -> set[str]:
    """Names of metrics in `expression` that the reference does not have, and labels that their metric does not have."""
    known = reference() | {rule["record"]: {"cause"} for rule in RULES["groups"][0]["rules"]}
    wrong = set()
    for name, selector in METRIC.findall(expression):
        if name not in known:
            wrong.add(name)
        else:
            wrong |= set(re.findall(r"(\w+)\s*[=!]", selector)) - known[name] - OF_PROMETHEUS
    labels = {label for names in re.findall(r"by \(([^)]*)\)", expression) for label in names.split(", ")}
    own = set().union(*(known.get(name, set()) for name, _ in METRIC.findall(expression)))
    return wrong | (labels - own - OF_PROMETHEUS)


def test_the_reference_is_read_as_it_is_written() -> None:
    known = reference()
    assert len(known) > 200 and known["foray_learner_seconds_total"] == {"cause"}
    assert "foray_rollout_search_seconds_bucket" in known and "foray_rollout_search_seconds" not in known
    assert {"foray_retriever_queries_total", "sglang:token_usage"} <= set(known)


@pytest.mark.parametrize(("where", "expression"), [pytest.param(*pair, id=pair[0]) for pair in expressions()])
def test_every_expression_names_metrics_and_labels_that_exist(where: str, expression: str) -> None:
    assert METRIC.search(expression) or "up{" in expression or "ALERTS{" in expression
    assert not unknown(expression)


def test_a_wrong_name_and_a_wrong_label_are_found() -> None:
    assert unknown("rate(foray_learner_seconds[5m])") == {"foray_learner_seconds"}
    assert unknown('foray_learner_step{colour="red"}') == {"colour"}
    assert unknown("sum by (colour) (foray_learner_step)") == {"colour"}
    assert unknown("run:foray_tokens:rate5m") == {"run:foray_tokens:rate5m"}


def test_panels_do_not_overlap_and_use_both_variables() -> None:
    board = dashboard()
    assert [variable["name"] for variable in board["templating"]["list"]] == ["datasource", "run"]
    places = []
    for panel in board["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        places.append((at["x"], at["y"], at["x"] + at["w"], at["y"] + at["h"]))
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}" and "$run" in target["expr"]
    for (left, top, right, bottom), (x0, y0, x1, y1) in combinations(places, 2):
        assert right <= x0 or x1 <= left or bottom <= y0 or y1 <= top
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) > 40


def test_every_alert_has_a_unit_test_and_says_what_to_do() -> None:
    tested = UNIT_TESTS.read_text()
    for rule in RULES["groups"][1]["rules"]:
        assert rule["alert"] in tested
        assert set(rule["annotations"]) == {"summary", "todo"} and rule["labels"]["severity"]
    assert all(rule["record"] in tested for rule in RULES["groups"][0]["rules"])


def promtool(*arguments: str | Path) -> str:
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_passes_the_unit_tests_of_the_rules(tmp_path: Path) -> None:
    shutil.copyfile(RULES_FILE, tmp_path / command.RULES_NAME)
    shutil.copyfile(UNIT_TESTS, tmp_path / "test.yml")
    assert "SUCCESS" in promtool("test", "rules", tmp_path / "test.yml")


def test_promtool_reads_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    texts = [text.replace(INTERVAL, "[5m]") for _, text in expressions()]
    rules = [{"record": f"panel{number}", "expr": text} for number, text in enumerate(texts)]
    path = tmp_path / "panels.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", path)


@pytest.fixture
def run_dir(tmp_path: Path, redis_url: str) -> Iterator[Path]:
    (tmp_path / "resolved.yaml").write_text(f"run: {{id: r, redis_url: '{redis_url}'}}\n")
    with (
        registered(redis_url, "r", "learner", "http://127.0.0.1:11"),
        registered(redis_url, "r", "rollout", "http://127.0.0.1:12"),
        registered(redis_url, "r", "retriever", "http://127.0.0.1:13", "https://search.example/"),
    ):
        yield tmp_path


def write(tmp_path: Path, *given: str, token: Path | None = None) -> Path:
    out = tmp_path / "out"
    assert command.run(argparse.Namespace(given=list(given), config=None, out=out, token_file=token)) == 0
    return out


def test_the_command_writes_what_grafana_and_prometheus_read(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = write(run_dir, str(run_dir), token=run_dir / "viewer.token")
    (run_dir / "viewer.token").write_text("t" * 32)
    assert json.loads((out / "grafana.json").read_text())["title"] == "Foray"
    jobs = yaml.safe_load((out / "prometheus.yml").read_text())["scrape_configs"]
    assert {job["job_name"]: job["static_configs"][0] for job in jobs} == {
        "foray-learner": {"targets": ["127.0.0.1:11"]},
        "foray-rollout": {"targets": ["127.0.0.1:12"]},
        "foray-retriever": {"targets": ["127.0.0.1:13"], "labels": {"run": "r"}},
        "foray-retriever-https": {"targets": ["search.example"], "labels": {"run": "r"}},
    }
    assert {job["authorization"]["credentials_file"] for job in jobs} == {str(run_dir / "viewer.token")}
    assert "prometheus --config.file=" in capsys.readouterr().out
    promtool("check", "config", out / "prometheus.yml")


def test_without_a_run_there_is_a_dashboard_and_no_scrape_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    out = write(tmp_path)
    assert sorted(path.name for path in out.iterdir()) == ["grafana.json", "rules.yml"]
    assert "name a run" in capsys.readouterr().out
    with pytest.raises(UserError, match="does not exist"):
        write(tmp_path, "no-such-run")
