"""The scripts of Slurm's jobs, and what is submitted and cancelled for a wanted number of engines."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.config import RunConfig, load_config
from deploy.launch import slurm
from deploy.launch.launcher import open_backend
from deploy.launch.process import LocalBackend
from deploy.run.redis_server import connect
from foray.cli import main as foray
from protocol.errors import ForayError, UserError
from protocol.keys import Keys
from protocol.runtime.progress import Progress

HERE = Path(__file__).parent
GIVEN = ("/data/run.yaml", "run.steps=20")


def configured(tmp_path: Path, *overrides: str) -> RunConfig:
    template = tmp_path / "site.sh"
    template.write_text(slurm.TEMPLATE.read_text().replace("host=$(hostname)", "host=127.0.0.1"))
    given = [f"run.dir={tmp_path / 'run'}", "run.id=q", f"launch.slurm.template={template}", *overrides]
    return load_config(None, given)


def rendered(tmp_path: Path, part: str, *overrides: str) -> list[str]:
    text = slurm.render(configured(tmp_path, *overrides), GIVEN, part)
    script = tmp_path / f"{part}.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--exclude=SC2317,SC1090,SC1091", script], check=True)
    assert not re.search("@[A-Z_]+@", text), "all is filled in"
    return text.splitlines()


def options(lines: Sequence[str]) -> list[str]:
    """The options that sbatch reads: those before the first command."""
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    return [line.removeprefix("#SBATCH ") for line in lines[:first] if line.startswith("#SBATCH")]


def test_the_core_has_the_learners_nodes_and_starts_its_ranks_by_srun(tmp_path: Path) -> None:
    lines = rendered(tmp_path, "core", "launch.slurm.nodes=2", "launch.learner_ranks=4", "engine.kind={type: sglang}")
    own = options(lines)
    assert {"--job-name=q-core", "--requeue", "--nodes=2", "--ntasks-per-node=4", "--gres=gpu:4"} <= set(own)
    assert f"--output={tmp_path}/run/logs/core.log" in own and "--time=24:00:00" in own and "--time=4:00:00" not in own
    (start,) = [line for line in lines if "foray up" in line]
    assert "/data/run.yaml run.steps=20 launch.engines=0 launch.backend=slurm launch.redis=own" in start
    config = load_config(None, [word for word in shlex.split(start) if word.startswith("launch.learner_prefix")])
    assert config.launch.learner_prefix[:3] == ("srun", "--nodes=2", "--ntasks-per-node=4")
    assert config.launch.learner_prefix[-4:-2] == ("bash", "-c") and "RANK=$SLURM_PROCID" in slurm.RANK


def test_one_rank_needs_no_srun_and_cpus_no_gres(tmp_path: Path) -> None:
    lines = rendered(tmp_path, "core")
    assert not any("learner_prefix" in line for line in lines)
    assert not any("--gres" in line for line in options(lines)) and lines[-1] == "core"


def test_an_engine_follows_the_file_of_the_redis_url_with_its_own_login(tmp_path: Path) -> None:
    secret = tmp_path / "secrets"
    secret.mkdir()
    (secret / "node.env").write_text("FORAY_REDIS_URL=rediss://node:pass@node7:1/0\n")
    lines = rendered(
        tmp_path, "engine", f"launch.secrets={secret}", "engine.kind={type: sglang, args: ['--tp-size', '2']}"
    )
    own = options(lines)
    assert {"--job-name=q-engines", "--nodes=1", "--gres=gpu:2", "--time=4:00:00", "--signal=B:USR1@90"} <= set(own)
    assert f"    . {secret}/node.env" in lines and ":pass" not in "\n".join(lines)
    block = "\n".join(line for line in lines if "login" in line).replace("local ", "")
    script = f"FORAY_REDIS_URL=rediss://node:pass@node7:1/0\n{block}\necho $FORAY_REDIS_URL"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"file://node:pass@{tmp_path}/run/redis.url"
    assert lines[-1] == "engine"


BY_TIME, BY_DOWN, BY_SLURM = signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM
REQUEUED = ["scontrol requeue"]


@pytest.mark.parametrize(
    ("part", "signals", "code", "did"),
    [
        ("core", [BY_TIME], 0, REQUEUED),
        ("core", [BY_TIME, BY_SLURM], 7, REQUEUED),
        ("core", [BY_SLURM, BY_TIME], 7, REQUEUED),
        ("core", [BY_TIME, BY_DOWN], 0, []),
        ("core", [BY_DOWN, BY_SLURM, BY_TIME], 0, []),
        ("core", [BY_SLURM], 0, []),
        ("engine", [BY_TIME], 0, REQUEUED),
        ("engine", [BY_SLURM, BY_TIME], 0, REQUEUED),
        ("engine", [BY_DOWN, BY_TIME], 0, []),
        ("engine", [BY_SLURM], 7, []),
    ],
)
def test_a_job_starts_again_after_its_time_but_not_after_a_stop(
    tmp_path: Path, part: str, signals: list[signal.Signals], code: int, did: list[str]
) -> None:
    lines, up = rendered(tmp_path, part), {"core": "up", "engine": "engine"}[part]
    body = "\n".join(lines[lines.index("child='' sent='' told='' asked='' again=''") : -1])
    child = "import os, signal, sys, time\ncame = []\nsignal.signal(signal.SIGTERM, lambda *_: came.append(1))\n"
    child += "print(os.getpid(), flush=True)\nwhile not came or not os.path.exists('told'): time.sleep(0.01)\n"
    child += f"print('SIGTERM', len(came), flush=True)\nos._exit({code})"
    (tmp_path / "child.py").write_text(child)
    for name in ("redis.url", "resolved.yaml"):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / name).write_text("there")
    # the script polls each second: here more often
    programs = {**{name: f"echo {name} $1" for name in ("scontrol", "scancel")}, "sleep": "exec /bin/sleep 0.02"}
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    command = next(line for line in body.splitlines() if line.startswith(f"  supervise {sys.executable} -m foray {up}"))
    body = body.replace(command, f"  supervise {sys.executable} child.py")
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    script = f"host=h\nset -u\n{body}\n{part}"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path) as shell:
        assert shell.stdout is not None
        own = int(shell.stdout.readline())
        for number in signals:
            shell.send_signal(number)
            if number == BY_SLURM:  # to every process
                os.kill(own, number)
        (tmp_path / "told").touch()
        said = shell.stdout.read().splitlines()
    assert (said[1:], shell.returncode) == (did, code), said
    assert said[0] == "SIGTERM 1" or BY_SLURM in signals


@dataclass
class Queue:
    """squeue, sbatch and scancel over a list of jobs: (id, name, task, state)."""

    jobs: list[tuple[str, str, str, str]] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)
    comments: dict[str, str] = field(default_factory=dict)
    ends: bool = False

    def __call__(self, argv: Sequence[str]) -> str:
        self.calls.append(list(argv))
        if argv[0] == "squeue":
            assert "--name=q-core,q-engines" in argv
            lines = [f"{id_} {task} {state} {self.comments.get(id_, '(null)')}" for id_, _, task, state in self.jobs]
            return "\n".join(lines)
        if argv[0] == "scontrol":
            self.comments[argv[2].removeprefix("JobId=")] = argv[3].removeprefix("Comment=")
        if argv[0] == "scancel" and self.ends:
            self.jobs = [job for job in self.jobs if job[0] != argv[-1]]
        return "77\n" if argv[0] == "sbatch" else ""

    @property
    def did(self) -> list[str]:
        return [" ".join(call) for call in self.calls if call[0] not in ("squeue", "scontrol")]


def test_the_first_submit_makes_both_and_a_later_one_only_what_is_missing(tmp_path: Path) -> None:
    config, queue = configured(tmp_path, "launch.engines=2"), Queue()
    folder = tmp_path / "run" / "slurm"
    assert slurm.submit(config, GIVEN, queue) == ["core: job 77", "engines 1, 2: job 77"]
    assert queue.did == [f"sbatch --parsable {folder}/core.sh", f"sbatch --parsable --array=1,2 {folder}/engine.sh"]
    assert (tmp_path / "run" / "logs").is_dir() and (folder / "core.sh").read_text().startswith("#!/bin/bash\n#SBATCH")
    queue = Queue([("5", "q-core", "N/A", "R"), ("6_1", "q-engines", "1", "R"), ("6_3", "q-engines", "3", "PD")])
    assert slurm.submit(config, GIVEN, queue) == [] and queue.did == []
    queue.jobs.append(("6_2", "q-engines", "2", "CG"))
    assert slurm.scale(config, 4, queue) == ["engines 2, 4: job 77"], "one that ends is not there"


def test_fewer_engines_drain_through_redis_first_and_what_waits_is_cancelled(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [(f"6_{task}", "q-engines", str(task), "PD" if task == 2 else "R") for task in (1, 2, 3, 4)]
    queue, config = Queue(jobs), configured(tmp_path)
    (tmp_path / "run").mkdir()
    monkeypatch.setattr(slurm, "redis_file_url", lambda directory: redis_url)
    said = slurm.scale(config, 1, queue)
    assert said == ["engine-3: drains", "engine-4: drains", "engine-2: cancelled"]
    with connect(redis_url) as client:
        assert client.smembers(Keys("q").drain) == {b"engine-3", b"engine-4"}
        client.delete(Keys("q").drain)
    assert queue.did == [
        "scancel --batch --signal=USR2 6_3", "scancel --batch --signal=USR2 6_4", "scancel --quiet 6_2",
    ]  # fmt: skip
    queue.jobs.pop(1)
    assert slurm.scale(config, 2, queue) == ["engines 2: job 77"], "those that drain are not counted"
    queue.jobs.append(("77_2", "q-engines", "2", "R"))
    assert slurm.scale(config, 2, queue) == []
    assert slurm.scale(config, 4, queue) == ["engines 5, 6: job 77"], "their numbers are still in use"
    monkeypatch.undo()
    assert "not asked through Redis to drain" in slurm.scale(config, 0, queue)[0], "without a core there is none"


def test_down_stops_the_core_by_its_script_and_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Queue([("5", "q-core", "N/A", "R"), ("6_1", "q-engines", "1", "R"), ("6_2", "q-engines", "2", "PD")])
    monkeypatch.setattr(slurm, "POLL_S", 0.0)
    with pytest.raises(ForayError, match="jobs 5, 6_1, 6_2 did not end within 0 s"):
        slurm.stop("q", 0, queue)
    queue.ends = True
    queue.calls.clear()
    assert len(slurm.stop("q", 5, queue)) == 3 and slurm.stop("q", 5, queue) == []
    assert queue.did[0] == "scancel --batch --signal=USR2 5" and queue.did[2] == "scancel --quiet 6_2"


def test_up_submits_and_down_finds_jobs_whose_core_never_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, queue = configured(tmp_path, "launch.backend=slurm"), Queue(ends=True)
    (tmp_path / "run.yaml").write_text(config.to_yaml())
    for name, default in (("submit", slurm.submit.__defaults__), ("stop", slurm.stop.__defaults__)):
        assert default
        monkeypatch.setattr(getattr(slurm, name), "__defaults__", (queue,))
    assert foray(["up", str(tmp_path / "run.yaml"), "--dry-run"]) == 0 and queue.calls == []
    assert "host chosen by slurm" in capsys.readouterr().out
    assert foray(["up", str(tmp_path / "run.yaml"), "--takeover"]) == 2 and queue.calls == []
    assert foray(["up", str(tmp_path / "run.yaml")]) == 0
    assert "core: job 77" in capsys.readouterr().out and len(queue.did) == 2
    queue.jobs.append(("77", "q-core", "N/A", "PD"))
    assert foray(["down", str(tmp_path / "run")]) == 0
    assert "job 77: cancelled" in capsys.readouterr().out and queue.jobs == []
    with pytest.raises(UserError, match="no job of the run"):
        open_backend(config, Progress.of(print))
    monkeypatch.setenv("SLURM_JOB_NAME", "q-core")
    assert isinstance(open_backend(config, Progress.of(print)), LocalBackend)


def test_jobs_on_several_nodes_need_secrets(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"need launch\.secrets"):
        slurm.check(load_config(None, []))
    with pytest.raises(UserError, match="does not exist"):
        slurm.check(load_config(None, ["launch.slurm.template=/no/such"]))


def test_the_command_writes_the_template_and_takes_no_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.yaml").write_text("run: {id: q}\n")
    assert foray(["submit", "--template", str(tmp_path / "mine.sh")]) == 0
    assert (tmp_path / "mine.sh").read_text() == slurm.TEMPLATE.read_text()
    assert foray(["submit", str(tmp_path / "run.yaml"), "run.redis_url=redis://:pw@h/0"]) == 2
    assert "pw" not in capsys.readouterr().err
