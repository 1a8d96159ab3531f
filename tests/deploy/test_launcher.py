"""The launcher with a real Redis and stand-ins for the four services: order, failure, stop, run directory.

The stand-ins are started with the command lines of the plan: a script replaces the interpreter.
"""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from deploy.config import RunConfig, load_config
from deploy.doctor.finding import NotReady
from deploy.launch.launcher import Launcher, RunStopped
from deploy.launch.process import ProcessFailed
from deploy.run.redis_server import connect, ping
from deploy.run.run_dir import is_held, read_record
from foray.commands import down
from foray.commands.watch.runs import find_runs
from protocol.errors import UserError
from protocol.keys import Keys
from protocol.run_meta import LINEAGE_FILE, RunMeta
from protocol.runtime.progress import Progress
from tests.support.waiting import wait_until

STAND_IN = """#!{python}
import http.server, json, os, signal, sys, threading, time
from pathlib import Path
import redis, yaml
module = sys.argv[2]
config = yaml.safe_load(open(sys.argv[sys.argv.index("--config") + 1]))
given = dict(a.split("=", 1) for a in sys.argv if "=" in a)
run = Path(config["run"]["dir"])
def note(word):
    with open(run / "order.txt", "a") as file:
        file.write(f"{{word}} {{module}}\\n")
def stop(*_):
    note("stop"); os._exit(0)
signal.signal(signal.SIGTERM, stop)
note("start")
if module in ("retriever", "rollout_server"):
    from protocol.codec import encode
    from protocol.keys import Keys
    from protocol.messages import MetricsSnapshot
    kind = "retriever" if module == "retriever" else "rollout"
    text = dict(url="http://127.0.0.1:1", state="ready", incarnation=str(os.getpid()))
    mine = MetricsSnapshot(process=kind, id=given[kind + ".id"], text=text)
    db = redis.Redis.from_url(config["run"]["redis_url"])
    db.set(Keys(config["run"]["id"]).metrics(kind, mine.id), encode(mine))
    time.sleep(60)
elif module == "rollout_server.node":
    from protocol.codec import encode
    from protocol.keys import Keys
    from protocol.messages import EngineInfo, NodeState
    name = given["engine.id"]
    info = EngineInfo(id=name, url="http://127.0.0.1:1", state=NodeState.READY, incarnation=str(os.getpid()))
    redis.Redis.from_url(config["run"]["redis_url"]).hset(Keys(config["run"]["id"]).engine(name), "b", encode(info))
    time.sleep(60)
else:
    wanted = os.environ["STAND_IN_LEARNER"]
    record = dict(step=1, reward_mean=0.25, lag_mean=0.5, lag_max=1, step_s=2.0,
                  tokens_generated=200, tokens_trained=100, seconds=dict(wait=1.5, compute=0.5))
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record) + "\\n")
    if wanted == "second":
        begun = (run / "order.txt").read_text().count("start learner")
        wanted = "wait" if begun == 1 else "0"
    if wanted == "wait":
        time.sleep(60)
    # one that is stopped before it has its handler says nothing of it
    until = time.monotonic() + 20
    while "start rollout_server\\n" not in (run / "order.txt").read_text() and time.monotonic() < until:
        time.sleep(0.01)
    print("the last words of the learner", flush=True)
    note("end")
    sys.exit(int(wanted))
"""


def configured(tmp_path: Path, learner: str = "0", *overrides: str) -> RunConfig:
    script = tmp_path / "python"
    script.write_text(STAND_IN.format(python=sys.executable))
    script.chmod(0o755)
    return load_config(
        None,
        [
            f"run.dir={tmp_path / 'run'}",
            f"run.model={tmp_path / 'model'}",
            f"retriever.corpus={tmp_path / 'corpus.jsonl'}",
            f"learner.questions={tmp_path / 'questions.jsonl'}",
            f"launch.env.STAND_IN_LEARNER='{learner}'",
            "run.steps=1",
            "launch.ready_s=30",
            "launch.restart_learner=0",
            *overrides,
        ],
    )


def launcher(config: RunConfig, tmp_path: Path, said: list[str] | None = None) -> Launcher:
    return Launcher(config, say=(said if said is not None else []).append, python=str(tmp_path / "python"))


def finish(given: Launcher) -> None:
    """Start all processes and wait for the learner's last step."""
    with given:
        given.start()
        given.wait()


def order(tmp_path: Path) -> list[str]:
    return (tmp_path / "run" / "order.txt").read_text().splitlines()


@pytest.mark.slow
def test_a_run_starts_in_order_says_its_steps_and_ends_with_the_learner(run_files: Path) -> None:
    said: list[str] = []
    finish(launcher(configured(run_files), run_files, said))
    lines = order(run_files)
    assert lines[0] == "start retriever"
    begun = {line for line in lines if line.startswith("start")}
    assert begun == {f"start {m}" for m in ("retriever", "rollout_server.node", "rollout_server", "learner")}
    stops = [line for line in lines if line.startswith("stop")]
    assert stops == ["stop rollout_server", "stop rollout_server.node", "stop retriever"]
    steps = [line for line in said if line.startswith("step 1/1")]
    assert (
        len(steps) == 1
        and "reward_mean 0.250" in steps[0]
        and "reward/em" not in steps[0]
        and "learner waits for rollouts (75%)" in steps[0]
    )
    record = read_record(run_files / "run")
    assert record["state"] == "done" and not is_held(run_files / "run")
    assert ping(f"unix://{run_files}/run/redis/redis.sock"), "our Redis has ended too"


def test_a_takeover_passes_what_the_other_run_left_in_redis(run_files: Path, redis_socket: str) -> None:
    config = configured(run_files, "wait", f"run.redis_url=unix://{redis_socket}", "run.id=taken-over")
    other = RunMeta(tokenizer="c" * 64, facts={"host": "far", "dir": "/theirs"}, lineage_id="d" * 32)
    client = connect(config.run.redis_url)
    client.hset(Keys(config.run.id).meta, mapping=other.fields())
    client.close()
    with pytest.raises(NotReady) as refused, launcher(config, run_files):
        pass
    assert "--takeover" in refused.value.render()
    with Launcher(config, say=print, python=str(run_files / "python"), takeover=True) as started:
        assert not started.supervisor.children


@pytest.mark.parametrize("learns", [True, False])
def test_the_directory_has_a_lineage_id_from_the_start_where_the_learner_runs(run_files: Path, learns: bool) -> None:
    path = run_files / "run" / LINEAGE_FILE
    with launcher(configured(run_files, "wait", f"launch.learner={learns}"), run_files) as started:
        assert path.exists() == learns
        assert not started.supervisor.children
    assert not learns or len(path.read_text()) == 33


@pytest.mark.slow
def test_every_process_has_a_log_and_the_resolved_file_works_manually(run_files: Path) -> None:
    with launcher(configured(run_files, "wait"), run_files) as started:
        started.start("redis", "retriever")
        resolved = yaml.safe_load((run_files / "run" / "resolved.yaml").read_text())
        assert resolved["rollout"]["search"]["urls"] == [], "those that register"
        client = connect(resolved["run"]["redis_url"])
        assert client.ping()
        client.close()
        record = read_record(run_files / "run")
        assert [p["name"] for p in record["processes"]] == ["redis", "retriever-1"]
        assert record["pid"] == os.getpid() and all(p["pid"] > 0 for p in record["processes"])
        assert started.during(lambda task: 6 * 7) == 42
        started.start()
        assert len(read_record(run_files / "run")["processes"]) == 5
    names = {path.name for path in (run_files / "run" / "logs").iterdir()}
    assert names == {"redis.log", "retriever-1.log", "engine-1.log", "rollout-1.log", "learner.log"}


@pytest.mark.slow
def test_the_first_failure_ends_the_run_with_its_name_code_and_log_tail(run_files: Path) -> None:
    with pytest.raises(ProcessFailed) as failure:
        finish(launcher(configured(run_files, "3"), run_files))
    text = failure.value.render()
    assert "learner exited with code 3" in text and "| the last words of the learner" in text
    record = read_record(run_files / "run")
    assert record["state"] == "failed" and record["failure"] == failure.value.render()
    assert len([line for line in order(run_files) if line.startswith("stop")]) == 3


@pytest.mark.slow
def test_a_fenced_learner_ends_the_run_with_code_75(run_files: Path) -> None:
    with pytest.raises(ProcessFailed) as failure:
        finish(launcher(configured(run_files, "75"), run_files))
    assert failure.value.exit_code == 75


@pytest.mark.slow
def test_an_engine_that_is_killed_comes_back_and_the_run_goes_on(run_files: Path) -> None:
    said: list[str] = []
    with launcher(configured(run_files, "wait"), run_files, said) as started:
        started.start()
        os.kill(started.supervisor.children["engine-1"].pid, signal.SIGKILL)
        wait_until(
            lambda: started.check() is None and order(run_files).count("start rollout_server.node") == 2, "it is back"
        )
        assert read_record(run_files / "run")["restarts"] == {"engine-1": 1}
    assert any("engine-1 was killed by SIGKILL (out of memory?): restarting it (1 of 3 " in line for line in said)


@pytest.mark.slow
def test_a_learner_that_is_killed_while_the_run_waits_for_it_comes_back_and_finishes(run_files: Path) -> None:
    # killed between two checks: the death of a learner must not be taken for the end of the run
    said: list[str] = []
    with launcher(configured(run_files, "second", "launch.restart_learner=3"), run_files, said) as started:
        started.start()
        wait_until(lambda: "start learner" in order(run_files), "the learner is there")
        child = started.supervisor.children["learner"]
        os.kill(child.pid, signal.SIGKILL)
        wait_until(lambda: child.poll() is not None, "it is dead")
        started.wait()
    assert order(run_files).count("start learner") == 2 and "end learner" in order(run_files)
    assert any("learner was killed by SIGKILL (out of memory?): restarting it (1 of 3 " in line for line in said)


@pytest.mark.slow
def test_a_learner_that_something_else_stops_is_interrupted_and_not_done(
    run_files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ProcessFailed, match="learner was stopped by SIGTERM"):
        finish(launcher(configured(run_files, "143"), run_files))
    record = read_record(run_files / "run")
    assert record["state"] == "interrupted" and record["error"] == "learner was stopped by SIGTERM"
    assert [one.state for one in find_runs(run_files)] == ["interrupted"]


def test_a_second_launcher_in_the_same_directory_is_refused_with_what_to_do(run_files: Path) -> None:
    config = configured(run_files, "wait", "launch.learner=false")
    with launcher(config, run_files) as first:
        first.start("redis")
        with pytest.raises(UserError) as refused, launcher(config, run_files):
            pass
        assert f"foray down {run_files / 'run'}" in refused.value.todo
        assert first.supervisor.children["redis"].poll() is None


def test_what_work_raises_comes_out_of_during(run_files: Path) -> None:
    def work(task: object) -> None:
        raise ZeroDivisionError("in the work")

    with pytest.raises(ZeroDivisionError), launcher(configured(run_files), run_files) as started:
        started.start("redis")
        started.during(work)


@pytest.mark.slow
def test_a_signal_that_also_ends_the_reader_of_the_lines_stops_the_run_in_order(run_files: Path) -> None:
    before = signal.getsignal(signal.SIGINT)  # ignored, where a shell has started pytest in the background
    reader, writer = os.pipe()
    with suppress(BrokenPipeError), os.fdopen(writer, "w") as lines, pytest.raises(RunStopped) as stopped:
        say = Progress.on(lines)
        with Launcher(configured(run_files, "wait"), say=say, python=str(run_files / "python")) as started:
            started.start()
            wait_until(lambda: "start learner" in order(run_files), "the learner is there")
            os.close(reader)  # `foray up run.yaml | tee log`: Ctrl-C ends tee too, and at once
            os.kill(os.getpid(), signal.SIGINT)
            started.wait()
    assert stopped.value.number == signal.SIGINT
    assert read_record(run_files / "run")["state"] == "stopped"
    assert next(line for line in order(run_files) if line.startswith("stop")) == "stop learner"
    assert signal.getsignal(signal.SIGINT) is before, "the handlers are as before"


@pytest.mark.slow
def test_a_model_that_is_not_there_is_prepared_first(run_files: Path) -> None:
    target = run_files / "made"
    make = f"import shutil; shutil.copytree({str(run_files / 'model')!r}, {str(target)!r})"
    command = json.dumps([[sys.executable, "-c", make + "; print('made {model}')"]])
    config = configured(run_files, "0", f"run.model={target}", f"launch.prepare={command}")
    finish(launcher(config, run_files))
    assert (target / "config.json").exists()
    assert (run_files / "run" / "logs" / "prepare-1.log").exists()


def test_a_preparation_that_fails_ends_it_with_its_log(run_files: Path) -> None:
    command = json.dumps([[sys.executable, "-c", "raise SystemExit('no data')"]])
    config = configured(run_files, "0", f"run.model={run_files / 'none'}", f"launch.prepare={command}")
    with pytest.raises(ProcessFailed, match="prepare-1 exited with code 1") as failure:
        finish(launcher(config, run_files))
    assert "no data" in failure.value.render() and not is_held(run_files / "run")


def test_a_missing_file_is_named_before_anything_is_started(run_files: Path) -> None:
    config = configured(run_files, "0", f"retriever.corpus={run_files / 'none.jsonl'}")
    with pytest.raises(UserError, match=r"retriever\.corpus"):
        finish(launcher(config, run_files))
    assert not (run_files / "run" / "logs").exists()


@pytest.mark.slow
def test_down_stops_a_run_of_another_process(run_files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configured(run_files, "wait")
    file = run_files / "run.yaml"
    file.write_text(config.to_yaml().replace("retrievers: null", "retrievers: 1"))
    code = (
        "import sys; from pathlib import Path\n"
        "from deploy.config import load_config; from foray.commands.up import up\n"
        "sys.executable = sys.argv[2]\n"
        "sys.exit(up(load_config(Path(sys.argv[1])), print, again='foray up run.yaml')[0])"
    )
    argv = [sys.executable, "-c", code, str(file), str(run_files / "python")]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            wait_until(lambda: read_record(run_files / "run").get("state") == "running", "it runs")
            assert down.run(_down(run_files / "run")) == 0
            assert process.wait(90) == 0
        finally:
            process.kill()
        assert process.stdout is not None
        said = process.stdout.read()
        assert "stopped after" in said and "no checkpoint was written yet" in said
        assert "resume from the start with: foray up run.yaml" in said
    out = capsys.readouterr().out
    assert "stopped" in out and "foray up run.yaml" in out
    assert down.run(_down(run_files / "run")) == 0
    assert "nothing was running" in capsys.readouterr().out


UP = """
import sys
from foray.cli import main
sys.executable = sys.argv[1]
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_says_the_command_that_continues_it(run_files: Path, number: signal.Signals) -> None:
    config = configured(run_files, "second")
    file = run_files / "run of mine.yaml"
    file.write_text(config.to_yaml().replace("retrievers: null", "retrievers: 1"))

    def foray(*words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", UP, str(run_files / "python"), *words]
        return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    with foray("up", str(file), "run.seed=3", "--json") as process:
        try:
            wait_until(lambda: read_record(run_files / "run").get("state") == "running", "it runs")
            wait_until(lambda: "start learner" in order(run_files), "the learner is there")
            process.send_signal(number)
            out, said = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else 0), said
    assert json.loads(out)["state"] == "stopped" and "no checkpoint was written yet" in said
    again = shlex.split(said.partition("resume from the start with: ")[2].splitlines()[0])
    assert again == ["foray", "up", str(file), "run.seed=3"]
    with foray(*again[1:]) as process:
        try:
            out, said = process.communicate(timeout=90)
        finally:
            process.kill()
    assert process.returncode == 0 and "done after" in out, out + said


@pytest.mark.slow
def test_a_closed_terminal_stops_the_run_in_order(run_files: Path) -> None:
    file = run_files / "run.yaml"
    file.write_text(configured(run_files, "wait").to_yaml().replace("retrievers: null", "retrievers: 1"))
    argv = [sys.executable, "-c", UP, str(run_files / "python"), "up", str(file)]
    pid, terminal = pty.fork()
    if not pid:
        os.execv(argv[0], argv)
    try:
        wait_until(lambda: read_record(run_files / "run").get("state") == "running", "it runs")
        wait_until(lambda: "start learner" in order(run_files), "the learner is there")
        os.close(terminal)
        wait_until(lambda: not is_held(run_files / "run"), "it has ended", 60)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert read_record(run_files / "run")["state"] == "stopped", read_record(run_files / "run")["error"]
    assert next(line for line in order(run_files) if line.startswith("stop")) == "stop learner"


def _down(directory: Path):  # type: ignore[no-untyped-def]
    import argparse

    return argparse.Namespace(run_dir=directory, timeout=90.0, json=False)
