"""`foray top` and `foray status` in every state of a run: the state's name, the values, the layout."""

from __future__ import annotations

import argparse
import fcntl
import json
import math
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from deploy.run.history import RECENT, RunHistory, read_history
from deploy.run.run_dir import LOCK, Located, write_record
from deploy.run.snapshot import LedgerTotals, RunSnapshot
from deploy.terminal import BLOCKS, sparkline
from foray.commands.watch import top as command
from foray.watch.status import look, problems, seq_balance, state, step_line, to_json, with_record
from foray.watch.status_page import render
from foray.watch.top import ENGINE_COLUMNS, Frame, Looks, frame, waits_in_words
from learner.observability import metrics as learner_metrics
from learner.observability.metrics import Meter
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, WeightUpdate
from protocol.settings import RunSettings
from rollout_server import metrics as rollout_metrics
from rollout_server.metrics import Stats

AWAY = "redis://127.0.0.1:1/0"
FAILED = {"state": "failed", "again": "foray up x"}
SPAWNED = {"state": "running", "processes": [{"kind": "learner"}]}


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


def snapshot(process: str, *, values: dict[str, float] | None = None, text: str = "", **more: Any) -> MetricsSnapshot:
    given = {"uptime_s": 10.0, "values": values or {}, "text": {"state": text} if text else {}} | more
    return MetricsSnapshot(process=process, id=process, **given)


ENGINE = EngineInfo(id="engine-1", url="http://127.0.0.1:1", state=NodeState.READY)
IDLE = RunSnapshot("r", "redis://x", now=5.0, processes=(snapshot("rollout"),), engines=(ENGINE,))
"""A rollout server and an engine, and no learner yet."""
TARGET = WeightUpdate(run="r", epoch=1, step=12, digest="d", path="/w")
LEARNER = snapshot("learner", values={"step": 12.0, "steps": 60.0}, text="training")
TRAINING = replace(
    IDLE,
    processes=(LEARNER, snapshot("rollout")),
    engines=(ENGINE.model_copy(update={"epoch": 1, "step": 12}),),
    target=TARGET,
    learner_epoch=1,
    lease_ms=1000,
)
ASKED = snapshot("rollout", values={"evaluations": 1.0})
EVALUATES = snapshot("rollout", values={"evaluations": 1.0, "pinned_evaluations": 1.0})


# --- (a) waits ---


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(learner_metrics, "time", clock)
    monkeypatch.setattr(rollout_metrics, "time", clock)
    return clock


def shares(looks: list[MetricsSnapshot]) -> list[list[str]]:
    found = [RunSnapshot("r", "redis://x", processes=(one,)) for one in looks]
    return [waits_in_words(now, before) for before, now in pairwise(found)]


def test_a_long_step_is_booked_as_it_passes_and_never_above_100_percent(clock: Clock) -> None:
    meter = Meter()
    clock.now += 1.0
    looks = [meter.snapshot("learner")]
    with meter.blocked_on("compute"):
        for _ in range(3):
            clock.now += 1.0
            looks.append(meter.snapshot("learner"))
        with meter.blocked_on("compute"):  # a second thread
            clock.now += 0.5
    clock.now += 0.5
    looks.append(meter.snapshot("learner"))
    result = shares(looks)
    assert [lines[0][:4] for lines in result] == ["100%", "100%", "100%", " 50%"]
    assert meter.seconds()["compute"] == 3.5


def test_a_rollout_servers_waits_are_read_by_the_clock_of_its_uptime(clock: Clock) -> None:
    stats = Stats("rollout", "r")
    stats.waits = type(stats.waits)(clock.monotonic)

    def slow() -> float:
        clock.now += 0.7  # what is read takes its time
        return 0.0

    stats.gauges["slow"] = slow
    with stats.waits.blocked_on("credit"):
        clock.now += 1.0
        looks = [stats.snapshot()]
        for _ in range(3):
            clock.now += 0.3
            looks.append(stats.snapshot())
    assert [lines[0][:4] for lines in shares(looks)] == ["100%"] * 3
    assert looks[-1].waits["credit"] == looks[-1].uptime_s


def test_shares_are_of_the_last_ten_seconds() -> None:
    looks, before = Looks(), []
    for second in range(1, 15):
        seen = replace(IDLE, now=float(second))
        earlier = looks.before(seen)
        before.append(earlier.now if earlier else None)
    assert before == [None, *[1.0] * 9, 1.0, 2.0, 3.0, 4.0]


# --- (b), (c) the end of a run ---


STEPS = [
    {"step": n, "epoch": 1, "reward_mean": n / 100, "step_s": 2.0, "tokens_trained": 500, "lag_mean": 0.5}
    | {"tokens_generated_per_s": 260.0}
    for n in range(1, 31)
]


@pytest.fixture
def found(tmp_path: Path) -> Located:
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, STEPS)) + '\n{"step')
    return Located(RunSettings(id="r", dir=tmp_path, steps=30), AWAY, tmp_path, {})


def test_top_reads_run_json_again_and_ends_with_the_run(found: Located) -> None:
    with (found.directory / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        write_record(found.directory, {"state": "running", "updated": time.time()})
        frames = command._frames(found, 0.01)
        assert next(frames).title == "run r: down"
        write_record(found.directory, {"state": "stopping", "updated": time.time()})
        stopping = next(frames)
        assert stopping.title == "run r: stopping" and not stopping.problems
    write_record(found.directory, {"state": "done"})
    last = next(frames)
    assert last.title == "run r: done" and not last.problems
    assert list(frames) == [], "nothing more comes"


def test_a_finished_run_is_shown_from_its_files(found: Located) -> None:
    write_record(found.directory, {"state": "done"})
    seen = replace(look(found), totals=LedgerTotals(30, 1, 60, {"trained": 60}))
    text = frame(seen, None, {}, max_lag=2).plain()
    assert "30 of 30, 2.0 s per step, weights 1.30 (checkpoint)" in text and "to go" not in text
    assert f"260 generated, 250 trained (mean of the last {RECENT} steps)" in text
    assert "0.300 trained, - generated" in text and "mean 0.50" in text and "exact match" not in text
    page = render(seen, max_lag=2)
    assert "step          30 of 30, 2.0 s per step" in page and "lag           mean 0.50" in page
    assert to_json(seen, max_lag=2)["figures"]["reward_mean"] == 0.3


def test_a_history_is_of_one_epoch_and_survives_a_line_that_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_history(path) == RunHistory()
    later = [step | {"epoch": 2, "step_s": None} for step in STEPS[10:12]]
    path.write_text("\n".join(map(json.dumps, [*STEPS, *later])) + "\n{")
    history = read_history(path)
    assert [r["step"] for r in history.recent] == [11, 12] and history.last["step"] == 12.0
    assert history.step_s == 0.0 and history.trained_per_s is None, "what was not measured is not 0"


# --- (d) states ---


@pytest.mark.parametrize(
    ("seen", "record", "alive", "word", "wrong"),
    [
        (RunSnapshot("r", "x", error="away"), {"state": "starting"}, True, "preparing", ""),
        (RunSnapshot("r", "x", error="away"), {"state": "starting"}, False, "down", "Redis does not answer"),
        (RunSnapshot("r", "x", error="away"), {"state": "stopping"}, True, "stopping", ""),
        (RunSnapshot("r", "x", error="away"), FAILED, False, "failed", "has failed"),
        (IDLE, {"state": "running"}, True, "preparing", ""),
        (IDLE, {"state": "running", "trains": False}, True, "serving", ""),
        (
            replace(IDLE, engines=(ENGINE.model_copy(update={"role": "eval"}),)),
            {"state": "running", "trains": False}, True, "serving", "",
        ),
        (replace(IDLE, processes=(EVALUATES,)), {"trains": False}, False, "evaluating", ""),
        (IDLE, {}, False, "waiting", "no learner is running"),
        (replace(IDLE, processes=(EVALUATES,)), {"state": "running"}, True, "evaluating", ""),
        (replace(IDLE, processes=(EVALUATES,), target_state="done"), {"state": "running"}, True, "evaluating", ""),
        (TRAINING, {"state": "running"}, True, "training", ""),
        (replace(TRAINING, processes=(LEARNER, EVALUATES)), {"state": "running"}, True, "training", ""),
        (
            # engines keep their version for the evaluation, however far the target is
            replace(TRAINING, processes=(LEARNER, EVALUATES), target=TARGET.model_copy(update={"step": 40})),
            {"state": "running"}, True, "training", "",
        ),
        (
            replace(TRAINING, processes=(snapshot("rollout"),)),
            SPAWNED | {"updated": 1.0}, True, "waiting", "no learner is running",
        ),
        (
            replace(TRAINING, processes=(snapshot("rollout"),)),
            SPAWNED | {"updated": math.inf}, True, "preparing", "",  # whenever this test runs, it is just now
        ),
    ],
)  # fmt: skip
def test_a_run_is_called_what_it_is(
    seen: RunSnapshot, record: dict[str, Any], alive: bool, word: str, wrong: str
) -> None:
    result = with_record(seen, record, alive=alive)
    found = [p.what for p in problems(result, max_lag=2)]
    assert state(result) == word
    assert wrong in found[0] if wrong else found == []


def test_a_learner_that_resumes_is_not_called_inconsistent_and_a_run_that_stops_has_no_time_left() -> None:
    counts = {"issued": 0.0, "settled": 448.0, "trained": 444.0, "stale": 4.0, "in_flight": 0.0}
    resumes = replace(
        TRAINING,
        processes=(snapshot("learner", values={"step": 111.0} | counts, text="starting"), snapshot("rollout")),
        totals=LedgerTotals(111, 1, 448, {"trained": 444, "stale": 4}),
        issued=456,
    )
    assert seq_balance(resumes).closes and seq_balance(resumes).line().startswith("issued 456 = trained 444")
    running = replace(TRAINING, history=RunHistory({}, ({"step_s": 2.0},)))
    stops = with_record(running, {"state": "stopping"}, alive=True)
    assert running.eta_s == 96.0 and stops.eta_s is None and state(stops) == "stopping"


def test_who_waits_for_whom_is_shown_while_a_run_works() -> None:
    waits = replace(TRAINING, processes=(LEARNER, snapshot("rollout", waits={"credit": 5.0})))
    assert "rollout servers wait for tasks" in frame(waits, None, {}, max_lag=2).plain()
    done = replace(waits, target_state="done")
    starting = replace(waits, processes=(snapshot("learner", text="starting"), *waits.processes[1:]))
    for seen in (done, starting):
        assert "wait" not in frame(seen, None, {}, max_lag=2).plain().replace("waiting", "")


def test_sparklines_begin_in_one_column_but_for_those_of_long_lines() -> None:
    def starts(shown: Frame, width: int = 120) -> list[int]:
        lines = [text for _, text in shown.rows(width)]
        return [min(i for i, c in enumerate(line) if c in BLOCKS) for line in lines if set(line) & set(BLOCKS)]

    trend = [float(n) for n in range(20)]
    facts = (("reward", "0.5 trained, 0.5 generated"), ("lag", "mean 1"))
    shown = Frame("run r", facts, (), (), (), {"reward": trend, "lag": trend})
    assert starts(shown) == [38, 38]
    long = replace(shown, facts=(*facts, ("tokens/s", "x" * 60)), trends={**shown.trends, "tokens/s": trend})
    assert starts(long) == [40, 40, 74]


def test_an_evaluation_is_shown_as_one() -> None:
    seen = replace(TRAINING, processes=(LEARNER, EVALUATES))
    assert "1 running (new weights wait for it)" in frame(seen, None, {}, max_lag=2).plain()
    page = render(seen, max_lag=2)
    assert page.count("1 running") == 1 and page.count("evaluation") == 1, "the page names it once"
    assert to_json(seen, max_lag=2)["evaluations"] == 1


def test_waits_of_engines_for_evaluation_are_not_those_of_training() -> None:
    waits = {"eval": 10.0}
    nodes = (
        snapshot("node", waits=waits).model_copy(update={"id": "eval-engine-1"}),
        snapshot("node").model_copy(update={"id": ENGINE.id}),
    )
    seen = replace(TRAINING, processes=nodes, engines=(ENGINE, ENGINE.model_copy(update={"id": "eval-engine-1"})))
    assert waits_in_words(seen, None) == ["100%  engines delay new weights until an evaluation ends"]
    apart = ENGINE.model_copy(update={"id": "eval-engine-1", "role": "eval"})
    assert waits_in_words(replace(seen, engines=(ENGINE, apart)), None) == []


def test_an_unpinned_episode_request_delays_no_weights_and_hides_no_problem() -> None:
    late = TARGET.model_copy(update={"step": 40})
    seen = replace(TRAINING, processes=(LEARNER, ASKED), target=late)
    shown = frame(seen, None, {}, max_lag=2).plain()
    assert "1 running" in shown and "new weights wait" not in shown
    assert "no engine is ready at 1.40" in shown


# --- (e) small terminals ---


def test_problems_come_first_and_a_small_terminal_says_what_is_cut() -> None:
    shown = frame(replace(TRAINING, engines=()), None, {}, max_lag=2)
    lines = shown.plain().splitlines()
    assert lines[1].startswith("  problem: no engine is registered")
    small = [text for _, text in shown.fitted(60, 14)]
    assert len(small) == 14 and all(len(line) <= 60 for line in small)
    assert small[1].startswith("  problem: no engine is registered")
    assert small[-1].startswith("  ") and "more lines (figures, waits): enlarge" in small[-1]
    assert shown.fitted(200, 60) == shown.rows()


BUSY = replace(
    TRAINING,
    run="a-run-with-a-name-of-quite-some-length-as-people-give-them-0",
    processes=(
        snapshot(
            "learner", values={"step": 12.0, "steps": 60.0, "reward_mean": 0.4, "lag_mean": 0.5}, waits={"data": 8}
        ),
        snapshot("rollout", values={"searches": 7.0, "reward_mean": 0.5}, waits={"credit": 1.0}),
    ),
    engines=tuple(
        ENGINE.model_copy(update={"id": f"eval-engine-{n}", "role": "eval", "detail": "x"}) for n in range(3)
    ),
    totals=LedgerTotals(12, 1, 60, {"trained": 60}, tokens={"generated": 10**9, "trained": 10**9}),
    history=RunHistory({}, tuple({"step_s": 2.0, "reward_mean": n / 20, "lag_mean": 1.0} for n in range(20))),
)
PHASES = {
    "preparing": replace(IDLE, awaits_learner=True),
    "training": BUSY,
    "unhealthy": replace(BUSY, engines=(), unreadable=("engine-1: " + "bytes " * 40,)),
    "evaluating": replace(BUSY, processes=(EVALUATES,), target_state="done"),
    "down": replace(BUSY, error="ConnectionError: " + "x" * 200),
    "stopped": replace(BUSY, stopped=True, processes=(), engines=(), again="foray up " + "long-name/" * 20),
    "done": replace(BUSY, target_state="done", processes=(), launch="done"),
}


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("phase", PHASES)
def test_every_phase_fits_a_terminal_of_this_width(phase: str, width: int) -> None:
    seen = PHASES[phase]
    shown = frame(seen, None, {}, max_lag=2)
    rows = shown.fitted(width, 1000)
    assert max(len(text) for _, text in rows) <= width
    parts = list(dict.fromkeys(part for part, _ in rows if part))
    assert parts == [part for part in ("problems", "figures", "waits", "engines") if part in parts], "problems first"
    words = " ".join(" ".join(text for _, text in rows).split())
    for _, text in shown.facts:
        assert " ".join(text.split()) in words, "wrapped, not cut"
    page = render(seen, max_lag=2, width=width).splitlines()
    assert all(len(line) <= width for line in page)
    if problems(seen, max_lag=2):
        assert parts[0] == "problems" and next(line for line in page if ":  " in line).startswith("problem:")


def test_a_narrow_table_keeps_what_matters_and_a_wide_one_everything() -> None:
    def header(width: int) -> list[str]:
        rows = frame(BUSY, None, {}, max_lag=2).rows(width)
        return next(text for part, text in rows if part == "engines" and text).split()

    assert header(60) == ["engine", "state", "version", "running", "tok/s", "role"]
    assert header(40) == ["engine", "state", "version", "role"]
    assert header(120) == header(0) == list(ENGINE_COLUMNS)


def test_sparklines_are_for_terminals_and_as_long_as_there_is_room() -> None:
    shown = frame(BUSY, None, {}, max_lag=2)
    assert not set(shown.plain()) & set(BLOCKS)
    reward = next(text for _, text in shown.rows(120) if text.startswith("  reward"))
    assert reward.endswith("  " + sparkline([float(n) for n in range(20)], 20)) and reward[-1] == "█"
    narrow = next(text for _, text in shown.rows(60) if text.startswith("  reward"))
    assert narrow[-1] == "█" and 4 <= sum(c in BLOCKS for c in narrow) < 20
    assert not set("".join(text for _, text in shown.rows(50) if text.startswith("  reward"))) & set(BLOCKS)
    assert sparkline([1.0, 1.0], 5) == "▁▁" and sparkline([], 5) == "" and sparkline([0.0, 7.0], 5) == "▁█"
    assert "reward        0.400 trained, 0.500 generated  ▁" in render(BUSY, max_lag=2, width=80)
    assert not set(render(BUSY, max_lag=2)) & set(BLOCKS)


def test_colours_mark_the_state_and_problems_only() -> None:
    page = render(PHASES["unhealthy"], max_lag=2, width=80, colour=True).splitlines()
    marked = [line for line in page if "\x1b[31m" in line]
    assert page[0].startswith("\x1b[1mrun ") and "problem:" in marked[0] and len(marked) >= 4
    assert all(line.endswith("\x1b[0m") for line in marked) and "\x1b" not in page[-1]


# --- (f) the time that is left ---


def test_the_time_to_go_is_that_of_the_steps_that_are_left() -> None:
    history = RunHistory({}, tuple({"step_s": s} for s in (2.0, 4.0)))
    seen = replace(TRAINING, history=history)
    assert seen.eta_s == 48 * 3.0
    assert step_line(seen) == "step 12 of 60, 3.0 s per step, about 2 min to go"
    assert f"step          {step_line(seen)[5:]}" in render(seen, max_lag=2), "status says the same"
    assert to_json(seen, max_lag=2)["eta_s"] == 144.0
    assert replace(seen, target_state="done").eta_s is None and TRAINING.eta_s is None
    long = replace(seen, history=RunHistory({}, ({"step_s": 300.0},)))
    assert step_line(long).endswith("about 4 h 0 min to go")


def test_into_a_pipe_it_prints_until_the_run_has_ended(found: Located, capsys: pytest.CaptureFixture[str]) -> None:
    (found.directory / "resolved.yaml").write_text(f"run: {{id: r, dir: {found.directory}, redis_url: '{AWAY}'}}\n")
    write_record(found.directory, {"state": "done"})
    args = argparse.Namespace(given=[str(found.directory)], config=None, interval=0.1, once=False, json=False)
    assert command.run(args) == 0
    assert capsys.readouterr().out.startswith("run r: done\n")
    args.json = True
    assert command.run(args) == 0
    (line,) = capsys.readouterr().out.splitlines()
    last = json.loads(line)
    assert last["state"] == "done" and last["waits"] == {} and last["retrievers"] == {}
