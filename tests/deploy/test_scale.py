"""The number of engines of a run while it goes on: requests, the learner's number, places, drains."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.config import LaunchSettings, RunConfig
from deploy.launch import scale
from deploy.launch.launcher import Launcher
from deploy.launch.scale import EngineScaler, followed
from deploy.run.redis_server import connect
from deploy.run.run_dir import read_record
from foray.cli import main
from protocol.codec import encode
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.messages import MetricsSnapshot
from tests.deploy.test_launcher import configured, launcher


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "LOOK_S", 0.05)


def alive(given: Launcher) -> set[str]:
    return {name for name in given.supervisor.children if name.startswith("engine")}


def check_until(given: Launcher, engines: set[str], leaving: int = 0) -> None:
    end = time.monotonic() + 30
    while alive(given) != engines or len(given._scaler.leaving) != leaving:
        assert time.monotonic() < end, (alive(given), given._scaler.leaving)
        given.check()
        time.sleep(0.02)


def report(given: Launcher, wanted: float) -> None:
    keys, client = Keys(given.config.run.id), connect(given.redis_url)
    snapshot = MetricsSnapshot(process="learner", id="0", values={"wanted_engines": wanted})
    client.set(keys.metrics("learner", "0"), encode(snapshot))
    client.close()


@pytest.mark.parametrize(
    ("requested", "reported", "most", "wanted"),
    [
        (None, 3, 0, None),
        (None, 0, 6, None),
        (None, 3, 6, 3),
        (None, 9, 6, 6),
        (None, 1, 6, 2),
        (7, 3, 6, 7),
        (0, 3, 6, 0),
    ],
)
def test_a_request_counts_before_the_learner_and_the_limits_bind_the_learner(
    requested: int | None, reported: float, most: int, wanted: int | None
) -> None:
    assert followed(requested, reported, least=2, most=most) == wanted


@pytest.mark.slow
def test_engines_start_and_drain_and_no_other_process_notices(
    run_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    config = configured(run_files, "wait", "launch.engines=2", "launch.autoscale={min: 1, max: 3}")
    with launcher(config, run_files, said) as given:
        given.start()
        assert alive(given) == {"engine-1", "engine-2"}, "engines that are only planned do not start"
        pids = {name: child.pid for name, child in given.supervisor.children.items()}
        run = str(run_files / "run")
        assert main(["scale", run, "engines=4"]) == 0
        assert "4 requested" in capsys.readouterr().out
        check_until(given, {"engine-1", "engine-2", "engine-3", "engine-4"})
        recorded = {p["name"] for p in read_record(run_files / "run")["processes"]}
        assert {"engine-3", "engine-4"} <= recorded, "status and logs find them"
        assert main(["scale", run, "engines=2", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["requested"] == 2
        check_until(given, {"engine-1", "engine-2"})
        report(given, 7.0)
        assert main(["scale", run, "engines=auto"]) == 0
        check_until(given, {"engine-1", "engine-2", "engine-3"})
        assert {name: given.supervisor.children[name].pid for name in pids} == pids
        slow = given.supervisor.children["engine-3"]
        slow.terminate = lambda: None  # type: ignore[method-assign]  # it drains for long
        report(given, 2.0)
        check_until(given, {"engine-1", "engine-2"}, leaving=1)
        del slow.terminate
    assert slow.poll() is not None, "it is stopped with the run"
    assert sum("drains and ends" in line for line in said) == 3 and not any("restarting" in line for line in said)


class Child:
    """A process that ends when it is told to end."""

    ended = False

    def poll(self) -> int | None:
        return 0 if self.ended else None

    def terminate(self) -> None:
        self.ended = True


gone: list[str] = []


def scaler(running: int, wanted: list[int | None], most: int = 9) -> tuple[EngineScaler, dict[str, Child]]:
    """An engine scaler whose engines are `Child`, with places for `most` of them; it reads wanted[0]."""
    gone.clear()
    children = {name: Child() for name in ("redis", "eval-engine-1", *(f"engine-{n + 1}" for n in range(running)))}

    def add(number: int) -> None:
        if number > most:
            raise UserError("there is no place", why="it is full", todo="reserve one")
        children[f"engine-{number}"] = Child()

    made = EngineScaler(LaunchSettings(), SimpleNamespace(children=children), add, gone.append, "redis://h:1/0", "r")  # type: ignore[arg-type]
    made._wanted = lambda: wanted[0]  # type: ignore[method-assign]
    made._due = -math.inf
    return made, children


def tick(made: EngineScaler) -> list[str]:
    made._due = -math.inf
    return made.tick()


def test_the_last_engines_leave_and_a_name_in_use_is_not_given_again() -> None:
    wanted: list[int | None] = [1]
    made, children = scaler(3, wanted)
    last = children["engine-3"]
    last.terminate = lambda: None  # type: ignore[method-assign]
    assert [line.split()[0] for line in tick(made)] == ["engine-2", "engine-3"]
    assert sorted(children) == ["engine-1", "eval-engine-1", "redis"]
    wanted[0] = 3
    assert [line.split()[0] for line in tick(made)] == ["engine-2"], "engine-3 still drains, on its GPU"
    last.ended = True
    assert [line.split()[0] for line in tick(made)] == ["engine-3"]
    wanted[0] = None
    assert tick(made) == [] and made.leaving == {} and gone == ["engine-2", "engine-3"], "their places are given back"


def test_an_engine_without_a_place_is_refused_once_and_the_run_goes_on() -> None:
    wanted: list[int | None] = [5]
    made, children = scaler(1, wanted, most=2)
    started, refused = tick(made)
    assert "engine-2 starts" in started and "The run goes on with 2; reserve one" in refused
    assert tick(made) == [] and len(children) == 4
    wanted[0] = 1
    assert len(tick(made)) == 1
    wanted[0] = 2
    assert "engine-2 starts" in tick(made)[0], "there is a place again"


def test_all_engines_may_leave_and_come_back() -> None:
    wanted: list[int | None] = [2]
    made, children = scaler(0, wanted)
    assert tick(made) == [], "no engine has started yet"
    children["engine-1"] = Child()
    for number in (1, 0, 2):
        wanted[0] = number
        tick(made)
        tick(made)
    assert {"engine-1", "engine-2"} <= set(children)


def test_jobs_follow_requests_and_changes_of_the_learners_number() -> None:
    asked: list[int] = []
    wanted: list[int | None] = [2]
    made, _ = scaler(0, wanted)

    def jobs(number: int) -> list[str]:
        asked.append(number)
        if number == 9:
            raise UserError("sbatch failed", why="the queue is full")
        return [f"{number} jobs"]

    made._jobs = jobs
    assert tick(made) == [] and asked == [], "others may wait in the queue"
    wanted[0] = 3
    assert tick(made) == ["3 jobs"] and tick(made) == []
    made._requested = wanted[0] = 9
    assert tick(made) == ["sbatch failed: the queue is full. The number of engines stays; it is tried again"]
    assert made._due > time.monotonic() + 30
    tick(made)
    assert asked == [3, 9, 9]
    fresh, _ = scaler(0, [4])
    fresh._jobs, fresh._requested = jobs, 4
    assert tick(fresh) == ["4 jobs"], "a request of an earlier start of the core counts"


def test_wrong_numbers_are_refused(run_files: Path) -> None:
    for text in ("engines=many", "engines=-1", "engines=1001", "engines="):
        with pytest.raises(UserError, match="is not a number of engines"):
            scale_run(text)
    with pytest.raises(ValueError, match="below min"):
        RunConfig.model_validate({"launch": {"autoscale": {"min": 3, "max": 2}}})


def scale_run(*words: str) -> int:
    import argparse

    from foray.commands import scale as command

    parser = argparse.ArgumentParser()
    command.configure(parser)
    return command.run(parser.parse_args(words))
