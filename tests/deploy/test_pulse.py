"""No long silence: commands report every few seconds what they wait for."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploy.launch.plan import ProcessSpec, Ready
from deploy.launch.process import ManagedProcess
from deploy.launch.supervisor import Supervisor
from protocol.runtime.progress import Progress


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_line_comes_only_after_a_silence() -> None:
    clock, said = Clock(), list[str]()
    pulse = Progress(said.append, every_s=5, clock=clock)
    for second in range(13):
        clock.now = second
        pulse.beat(lambda: f"waiting, {clock.now:.0f} s")
        if second == 3:
            pulse("something else")
    assert said == ["something else", "waiting, 8 s"]
    pulse.beat(lambda: "never", every_s=30)
    assert "never" not in said


def test_work_goes_on_beside_the_looks_and_its_error_comes_out() -> None:
    seen = threading.Event()
    said = list[str]()
    progress = Progress(said.append)
    assert progress.beside(lambda task: seen.wait(10), seen.set, "work") is True

    def fail(task: object) -> None:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        progress.beside(fail, lambda: None, "work")


def process(tmp_path: Path, name: str, code: str, ready: Ready = Ready.HTTP) -> ProcessSpec:
    return ProcessSpec(name, "learner", (sys.executable, "-c", code), tmp_path / f"{name}.log", ready)


SLOW = (
    "import signal, sys, time\n"
    "def stop(*_): print('writing the checkpoint', flush=True); time.sleep(0.5); sys.exit(0)\n"
    "signal.signal(signal.SIGTERM, stop)\n"
    "print('2026-01-01 10:00:00,123 INFO 3 of 9 passages\\x1b[2J', flush=True)\n"
    "time.sleep(60)\n"
)


def test_start_and_stop_say_what_they_wait_for(tmp_path: Path, children: list[ManagedProcess]) -> None:
    said: list[str] = []
    pulse = Progress(said.append, every_s=0)
    supervisor = Supervisor(
        is_ready=lambda spec: any("3 of 9" in line for line in said),
        ready_s=30,
        shutdown_s=30,
        say=pulse,
        beat=pulse.beat,
    )
    children.append(supervisor.spawn(process(tmp_path, "learner", SLOW)))
    supervisor.await_ready(["learner"])
    assert any(
        line.startswith("waiting for learner (GET /ready returns 200), ") and r"its log: 3 of 9 passages\x1b[2J" in line
        for line in said
    ), said
    child = supervisor.children["learner"]
    child.spawned -= 100
    step, before = time.monotonic() - 5, child.spawned - 50
    assert [child.waiting_line("x", since=t).split(" s;")[0] for t in (step, before)] == [
        "waiting for learner x, 5",
        f"waiting for learner x, {time.monotonic() - child.spawned:.0f}",
    ]
    said.clear()
    assert supervisor.stop() == []
    assert said[0] == "stopping learner, which finishes its step and writes a checkpoint"
    assert any(line.startswith("waiting for learner to stop, ") and "writing the checkpoint" in line for line in said)


def test_the_warm_start_says_how_far_it_is() -> None:
    from foray.demo.demonstrations import practice
    from foray.demo.warmstart import WarmStartBudget, _course

    said: list[str] = []
    course = _course(0, WarmStartBudget(batch=1))
    with Progress(said.append, every_s=0).task("warm start", 3, "steps") as course.task:
        course.train(practice, 3, lambda step: 1e-3)
    assert said[0].startswith("warm start: 1 of 3 steps, 33%") and said[-1].startswith("warm start: 3 steps in ")


@pytest.mark.slow
def test_deepspeed_does_not_warn_on_the_screen_of_who_saves_a_model(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from foray.demo.warmstart import new_model, save_model\n"
        "save_model(new_model(0), Path(sys.argv[1]))\n"
    )
    argv = [sys.executable, "-c", code, str(tmp_path / "model")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=True)
    assert "accelerator" not in done.stdout + done.stderr
