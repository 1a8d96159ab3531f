"""Starting, restarting and stopping, with tiny real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.process import ManagedProcess, ProcessFailed
from deploy.launch.supervisor import RESTARTS_S, EngineLosses, Readiness, Supervisor
from protocol import events
from protocol.codec import encode
from protocol.errors import ForayError, UserError
from protocol.keys import Keys
from protocol.messages import EngineInfo, NodeState
from protocol.runtime.service_cli import describe_exit
from tests.support.waiting import wait_until

SLEEP = "import time; time.sleep(60)"
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
ORDERLY = (
    "import signal, sys, time\n"
    "def stop(*_):\n    open(sys.argv[1], 'a').write(sys.argv[2] + ' '); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop); print('up', flush=True); time.sleep(60)"
)


def spec(tmp_path: Path, name: str, code: str, *args: str, kind: str = "rollout", restarts: int = 0) -> ProcessSpec:
    return ProcessSpec(
        name, kind, (sys.executable, "-c", code, *args), tmp_path / f"{name}.log", Ready.RUNNING, restarts=restarts
    )


def has_spoken(given: ProcessSpec) -> bool:
    return given.log.exists() and "up" in given.log.read_text()


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def supervisor() -> Iterator[Supervisor]:
    made = Supervisor(is_ready=has_spoken, ready_s=10, shutdown_s=0.5)
    yield made
    made.hurry()
    made.stop()


def test_a_failure_is_reported_with_name_exit_code_and_log_tail(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.spawn(spec(tmp_path, "engine-1", "print('up', flush=True); print('no such model'); raise SystemExit(3)"))
    with pytest.raises(ProcessFailed) as failure:
        wait_until(lambda: supervisor.check() is not None, "the death is seen")
    text = failure.value.render()
    assert "engine-1 exited with code 3" in text and "| no such model" in text and "engine-1.log" in text
    assert failure.value.exit_code == 1


def test_the_tail_shows_only_what_this_process_wrote(tmp_path: Path, supervisor: Supervisor) -> None:
    (tmp_path / "x.log").write_text("an older run's words\n")
    child = supervisor.spawn(spec(tmp_path, "x", "print('mine')"))
    assert child.wait(10) and child.tail() == "mine"


@pytest.mark.parametrize("code", [2, 65, 75])
def test_a_process_that_would_end_so_again_is_not_tried_again_and_keeps_its_code(
    tmp_path: Path, supervisor: Supervisor, code: int
) -> None:
    supervisor.spawn(spec(tmp_path, "learner", f"raise SystemExit({code})", kind="learner", restarts=5))
    with pytest.raises(ProcessFailed) as failure:
        wait_until(lambda: supervisor.check() is not None, "the death is seen")
    assert failure.value.exit_code == code and not supervisor.restarts
    assert ("no training signal" in str(failure.value)) == (code == 65)


def test_a_process_is_started_again_as_often_as_it_may_and_then_ends_the_run(
    tmp_path: Path, supervisor: Supervisor
) -> None:
    supervisor.spawn(spec(tmp_path, "engine-1", "print('up', flush=True); raise SystemExit(1)", restarts=2))
    with pytest.raises(ProcessFailed, match="after 2 restarts"):
        wait_until(lambda: supervisor.check() is not None, "restarts are used up")
    assert (tmp_path / "engine-1.log").read_text().count("up") == 3


def test_restarts_of_more_than_an_hour_ago_do_not_count(tmp_path: Path, supervisor: Supervisor) -> None:
    now = [0.0]
    supervisor._clock = lambda: now[0]
    supervisor.spawn(spec(tmp_path, "learner", "raise SystemExit(1)", kind="learner", restarts=2))
    wait_until(lambda: supervisor.check() is None and supervisor.restarts.get("learner") == 2, "it restarts twice")
    now[0] = RESTARTS_S
    wait_until(lambda: supervisor.check() is None and supervisor.restarts["learner"] == 3, "an hour later it restarts")
    now[0] += 1
    with pytest.raises(ProcessFailed, match="after 2 restarts within an hour"):
        wait_until(lambda: supervisor.check() is not None, "the loop ends the run")


@pytest.mark.parametrize("code", [143, 130, -15])
def test_a_learner_that_is_stopped_alone_is_interrupted_and_restarted(
    tmp_path: Path, supervisor: Supervisor, code: int
) -> None:
    end = f"os.kill(os.getpid(), {-code})" if code < 0 else f"os._exit({code})"
    supervisor.spawn(spec(tmp_path, "learner", f"import os; {end}", kind="learner", restarts=1))
    with pytest.raises(ProcessFailed, match="was stopped by SIG") as failure:
        wait_until(lambda: supervisor.check() is not None, "the second end is seen")
    assert not supervisor.ended("learner") and supervisor.restarts == {"learner": 1}
    assert failure.value.state == "interrupted" and failure.value.exit_code == 1


def test_a_process_that_was_killed_is_reported_with_what_saves_memory(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.spawn(spec(tmp_path, "learner", "import os; os.kill(os.getpid(), 9)", kind="learner"))
    with pytest.raises(ProcessFailed) as failure:
        wait_until(lambda: supervisor.check() is not None, "the death is seen")
    assert failure.value.state == "failed"
    assert "(out of memory?)" in failure.value.render() and "do: if it was the out-of-memory" in failure.value.render()


def test_a_killed_process_is_replaced_by_a_new_one(tmp_path: Path, supervisor: Supervisor) -> None:
    child = supervisor.spawn(spec(tmp_path, "engine-1", SLEEP, restarts=1))
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: supervisor.check() is None and supervisor.restarts, "it is started again")
    assert supervisor.children["engine-1"].pid != child.pid and supervisor.children["engine-1"].poll() is None


def test_a_learner_that_ends_with_code_0_is_done_and_not_a_failure(tmp_path: Path, supervisor: Supervisor) -> None:
    child = supervisor.spawn(spec(tmp_path, "learner", "print('up')", kind="learner"))
    assert child.wait(10)
    supervisor.check()
    assert supervisor.ended("learner")


def test_a_process_that_is_never_ready_is_reported(tmp_path: Path) -> None:
    supervisor = Supervisor(is_ready=lambda given: False, ready_s=0.3, shutdown_s=1)
    supervisor.spawn(spec(tmp_path, "retriever-1", SLEEP, kind="retriever"))
    try:
        with pytest.raises(ProcessFailed, match=r"retriever-1 was not ready 0.3 s after it last grew"):
            supervisor.await_ready(["retriever-1"])
    finally:
        supervisor.stop()


def test_a_registration_that_a_killed_run_left_is_no_ready_engine(tmp_path: Path, redis_socket: str) -> None:
    url, keys = f"unix://{redis_socket}", Keys(f"left-{os.getpid()}")
    engine = replace(spec(tmp_path, "engine-1", SLEEP, kind="engine"), ready=Ready.ENGINE)

    def register(incarnation: str, state: NodeState) -> None:
        info = EngineInfo(id="engine-1", url="http://127.0.0.1:1", state=state, incarnation=incarnation)
        client.hset(keys.engine("engine-1"), "b", encode(info))
        client.expire(keys.engine("engine-1"), 60)

    readiness = Readiness(url, keys.run)
    with redis.Redis.from_url(url) as client:
        register("old", NodeState.READY)
        assert readiness(engine), "nothing was there before"
        readiness.starting(engine)
        assert not readiness(engine)
        register("new", NodeState.SYNCING)
        assert not readiness(engine)
        register("new", NodeState.READY)
        assert readiness(engine)


def test_what_nodes_report_about_lost_engines_is_read_once_and_not_while_redis_is_away(
    redis_socket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deploy.launch.supervisor.LOOK_S", 0.0)
    keys = Keys(f"losses-{os.getpid()}")
    losses = EngineLosses(f"unix://{redis_socket}", keys.run)
    with redis.Redis.from_url(f"unix://{redis_socket}") as client:

        def report(name: str, kind: str, text: str) -> None:
            client.xadd(keys.events, events.fields("node", name, kind, text))
            client.expire(keys.events, 60)

        report("engine-1", events.ENGINE_LOST, "of an earlier start")
        assert losses.read() == []
        report("engine-1", "joined", "of no interest")
        report("engine-2", events.ENGINE_LOST, "the engine was killed by SIGKILL; its node launches it again")
        line = "engine-2: the engine was killed by SIGKILL; its node launches it again, the run continues"
        assert (losses.read(), losses.read()) == ([line], [])
        failed, hint = ForayError("20 episodes failed one after the other"), UserError("no model", todo="set one")
        for number in range(9):
            report(
                "engine-1", events.ENGINE_LOST, f"hung: no sign of life for {30 + number} s; its node launches it again"
            )
        said = losses.explained(failed, Path("runs/r"))
        assert isinstance(said, UserError) and losses.explained(hint, Path("runs/r")) is hint
        for part in (
            "error: engine engine-1 was lost 9 times, the last time: hung: no sign of life for 38 s",
            "why: so 20 episodes failed one after the other. runs/r/logs/engine-1.log has each loss",
            "do: the machine may be short of memory or of CPU time: `foray doctor` measures both",
        ):
            assert part in said.render()
        dead = ProcessFailed("learner", "exited with code 65", code=65, log=Path("learner.log"), tail="no signal")
        assert losses.explained(dead, Path("runs/r")) is dead
        assert "why: engine engine-1 was lost 9 times, the last time: hung" in dead.render()
    away = EngineLosses(f"unix://{redis_socket}.away", keys.run)
    assert away.read() == [] and away.explained(failed, Path("runs/r")) is failed


def test_parent_and_guard_of_an_engine_report_the_same_exit() -> None:
    assert describe_exit(-9) == describe_exit(128 + 9) == "was killed by SIGKILL (out of memory?)"
    assert describe_exit(-15) == describe_exit(128 + 15) == "was stopped by SIGTERM"
    assert describe_exit(3) == "exited with code 3" and describe_exit(65).endswith(": no training signal")


def test_the_stop_goes_from_the_learner_to_redis(tmp_path: Path, supervisor: Supervisor) -> None:
    for kind in ("redis", "retriever", "engine", "rollout", "learner"):
        orderly = spec(tmp_path, kind, ORDERLY, str(tmp_path / "order"), kind, kind=kind)
        supervisor.spawn(replace(orderly, stop_s=60.0))
    supervisor.await_ready(list(supervisor.children))
    assert supervisor.stop() == []
    assert (tmp_path / "order").read_text().split() == ["learner", "rollout", "engine", "retriever", "redis"]
    assert not supervisor.children


def test_what_does_not_stop_in_time_is_killed_with_all_that_it_started(tmp_path: Path, supervisor: Supervisor) -> None:
    grandchild = "import subprocess, sys; print('pid', subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid)\n"
    child = supervisor.spawn(spec(tmp_path, "engine-1", grandchild + STUBBORN, SLEEP, kind="engine"))
    supervisor.await_ready(["engine-1"])
    below = int((tmp_path / "engine-1.log").read_text().split()[1])
    assert is_alive(below)
    assert supervisor.stop() == ["engine-1"]
    wait_until(lambda: not is_alive(child.pid) and not is_alive(below), "both are gone")


def test_a_learner_that_writes_its_last_checkpoint_is_waited_for(tmp_path: Path, supervisor: Supervisor) -> None:
    slow = "import signal, sys, time\n" + (
        "def stop(*_):\n    time.sleep(2); print('saved', flush=True); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop); print('up', flush=True); time.sleep(60)"
    )
    supervisor.spawn(replace(spec(tmp_path, "learner", slow, kind="learner"), stop_s=60.0))
    supervisor.await_ready(["learner"])
    assert supervisor.stop() == []
    assert "saved" in (tmp_path / "learner.log").read_text(), "although shutdown_s is 0.5"


@pytest.mark.parametrize(("kind", "killed"), [("learner", []), ("engine", ["it"])])
def test_a_learner_that_computes_is_waited_for_however_long_its_step_is(
    tmp_path: Path, supervisor: Supervisor, kind: str, killed: list[str]
) -> None:
    step = "import signal, sys, time\n" + (
        "def stop(*_):\n    end = time.process_time() + 1.5\n    while time.process_time() < end: pass\n"
        "    sys.exit(0)\nsignal.signal(signal.SIGTERM, stop); print('up', flush=True); time.sleep(60)"
    )
    supervisor.spawn(spec(tmp_path, "it", step, kind=kind))
    supervisor.await_ready(["it"])
    assert supervisor.stop() == killed, "shutdown_s is 0.5"


def test_a_learner_that_does_not_compute_is_killed(tmp_path: Path, supervisor: Supervisor) -> None:
    supervisor.spawn(spec(tmp_path, "learner", STUBBORN, kind="learner"))
    supervisor.await_ready(["learner"])
    assert supervisor.stop() == ["learner"]


def test_what_a_killed_process_started_does_not_outlive_it(tmp_path: Path, supervisor: Supervisor) -> None:
    grandchild = "import subprocess, sys; print('pid', subprocess.Popen([sys.executable, '-c', sys.argv[1]]).pid)\n"
    child = supervisor.spawn(spec(tmp_path, "engine-1", grandchild + STUBBORN, SLEEP, kind="engine"))
    supervisor.await_ready(["engine-1"])
    below = int((tmp_path / "engine-1.log").read_text().split()[1])
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(5)
    wait_until(lambda: not is_alive(below), "the grandchild is gone")


def test_children_do_not_outlive_a_launcher_that_was_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path\n"
        "from deploy.launch.process import ManagedProcess; from deploy.launch.plan import ProcessSpec, Ready\n"
        f"argv = (sys.executable, '-c', {SLEEP!r})\n"
        "child = ManagedProcess(ProcessSpec('x', 'engine', argv, Path(sys.argv[1]), Ready.RUNNING))\n"
        "print(child.pid, flush=True); time.sleep(60)"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "x.log")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        assert is_alive(pid)
        launcher.kill()
    wait_until(lambda: not is_alive(pid), "the kernel has ended the child")


def test_a_ctrl_c_in_the_terminal_does_not_reach_the_children(tmp_path: Path, children: list[ManagedProcess]) -> None:
    child = ManagedProcess(spec(tmp_path, "x", SLEEP))
    children.append(child)
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
