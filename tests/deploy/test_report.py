"""`foray report`: one static page with everything of a run, on texts that try to be more than text."""

from __future__ import annotations

import argparse
import json
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from deploy.run.run_dir import write_record
from foray.commands.watch import report as command
from foray.watch.page import Chart
from foray.watch.records import trained_groups
from learner.checkpoint import journal as journal_module
from learner.checkpoint.journal import BatchConditions, GroupJournal
from learner.validation.results import ValidationFiles
from protocol.errors import UserError
from protocol.header import seal
from protocol.messages import Question
from protocol.versions import PolicyVersion
from tests.support.environments import write_tokenizer
from tests.support.messages import make_group

ATTACK = '<script>alert(1)</script><img src=x onerror="alert(2)"> a b'


class Page(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of 8 steps whose questions are attacks; its Redis is gone."""
    model = write_tokenizer(tmp_path / "model", "words")
    secret = "redis://:geheimnis@127.0.0.1:1/0"
    tree = {"run": {"id": "r", "dir": str(tmp_path), "steps": 8, "model": str(model), "redis_url": secret}}
    (tmp_path / "resolved.yaml").write_text(json.dumps(tree))
    write_record(tmp_path, {"state": "done"})
    lines = [
        {"step": n, "epoch": e, "reward_mean": n / 8 + e - 1, "lag_mean": 1.0, "step_s": 2.0}
        for e, steps in ((1, range(1, 6)), (2, range(4, 9)))
        for n in steps
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    journal = GroupJournal(tmp_path / "journal", 1 << 30)
    for step in range(1, 9):
        group = make_group(step, run="r", version=PolicyVersion(1, max(0, step - 2)))
        asked = group.model_copy(update={"question": Question(id="q", text=ATTACK, answers=("</pre>c",))})
        conditions = BatchConditions(now_step=step - 1, lineage=(), temperature=1.0, size=1, mixed=())
        journal.append(step, 1, [seal(asked)], conditions)
    journal.close()
    suites = {"nq": {"em": 0.5, "questions": 4.0, "failed": 0.0}}
    for step in (4, 8):
        record = {"name": f"step_{step}", "step": step, "suites": {"nq": suites["nq"] | {"em": step / 16}}}
        ValidationFiles(tmp_path).add(record)
    return tmp_path


def written(run_dir: Path, out: Path | None = None) -> str:
    assert command.run(argparse.Namespace(given=[str(run_dir)], config=None, out=out)) == 0
    return (out or run_dir / "report.html").read_text()


def test_the_page_has_every_part_and_its_texts_are_only_text(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = written(run_dir)
    page = Page(text)
    shown = "\n".join(part for part in page.texts if part.strip())
    for title in (
        "ledger",
        "dead letters",
        "Summary of the steps",
        "Curves",
        "Validation",
        "Staleness",
        "Trajectories",
    ):
        assert title in shown
    assert not {"script", "img", "link", "iframe", "a"} & set(page.tags)
    assert not [name for name in page.attributes if name.startswith("on") or name in ("src", "href")]
    assert "default-src 'none'" in page.attributes["content"][-1]
    assert ATTACK in shown and "</pre>c" in shown, "shown as it is"
    assert "geheimnis" not in text and "run.redis_url" in shown
    assert page.tags.count("svg") == 4, "reward, lag, seconds of a step, em"
    assert f"wrote {run_dir / 'report.html'}" in capsys.readouterr().out


def test_a_step_trained_twice_counts_with_its_later_epoch_and_the_lags_of_the_journal(
    run_dir: Path, tmp_path: Path
) -> None:
    shown = [part.strip() for part in Page(written(run_dir, tmp_path / "out" / "r.html")).texts if part.strip()]
    at = shown.index("reward_mean")
    assert shown[at + 1 : at + 5] == ["0.125", "2", "0.125", "2"], "first, last, smallest, largest"
    at = shown.index("lag in steps")
    assert shown[at + 3 : at + 9] == ["0", "16", "12.5%", "1", "112", "87.5%"]
    at = shown.index("nq/em")
    assert shown[at + 1 : at + 4] == ["8", "0.500", "0.500"]


def test_a_run_without_files_has_a_page_too_and_a_wrong_place_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text("run: {id: r}\n")
    write_record(tmp_path, {"state": "failed"})
    text = written(tmp_path)
    assert "the run has failed" in text and "<svg" not in text
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        written(tmp_path, tmp_path / "file" / "r.html")


def test_a_chart_stays_in_its_frame_and_a_long_curve_is_thinned() -> None:
    wave = {step: float(np.sin(step)) for step in range(1, 5001)}
    chart = Chart.of("wave", wave)
    points = [tuple(map(float, point.split(","))) for point in chart.points.split()]
    assert len(points) <= 360 and (chart.first, chart.last) == ("1", "5000")
    assert all(0 <= x <= 360 and 0 <= y <= 110 for x, y in points)
    assert points[0][0] == 0 and points[-1][0] == 360 and min(y for _, y in points) == 0
    assert Chart.of("flat", {3: 1.0, 4: 1.0}).points == "0.0,0.0 360.0,0.0"


def test_a_report_decodes_its_last_groups_and_not_the_whole_journal(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[object] = []
    decode = journal_module.decode_as
    monkeypatch.setattr(journal_module, "decode_as", lambda *given: decoded.append(given) or decode(*given))
    assert [entry.step for entry in trained_groups(run_dir, last=3)] == [6, 7, 8]
    assert len(decoded) == 3
