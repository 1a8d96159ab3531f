"""The scripts of Slurm's jobs, and what is submitted and cancelled for a wanted number of engines."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from deploy.config import RunConfig, load_config
from deploy.launch import slurm
from foray.cli import main as foray
from protocol.errors import UserError

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
    assert "/data/run.yaml run.steps=20 launch.engines=0 launch.redis=own" in start
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
    assert f"    . {secret}/node.env" in lines and "pass" not in "\n".join(lines).replace("passes", "")
    block = "\n".join(line for line in lines if "login" in line).replace("local ", "")
    script = f"FORAY_REDIS_URL=rediss://node:pass@node7:1/0\n{block}\necho $FORAY_REDIS_URL"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"file://node:pass@{tmp_path}/run/redis.url"
    assert lines[-1] == "engine"


def test_a_signal_reaches_the_process_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    lines = rendered(tmp_path, "core")
    begin, end = lines.index("child='' stopped=''"), lines.index("core() {")
    body = "\n".join(lines[begin:end])
    child = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
    child += "print('up', flush=True)\ntime.sleep(60)"
    script = f"{body}\nsupervise python3 -c {shlex.quote(child)}\necho $? $stopped"
    for number, why in ((signal.SIGUSR1, "time"), (signal.SIGUSR2, "term")):
        with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as shell:
            assert shell.stdout is not None and shell.stdout.readline() == "up\n"
            shell.send_signal(number)
            assert shell.stdout.read() == f"7 {why}\n"


@dataclass
class Queue:
    """squeue, sbatch and scancel over a list of jobs: (id, name, task, state)."""

    jobs: list[tuple[str, str, str, str]] = field(default_factory=list)
    calls: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str]) -> str:
        self.calls.append(list(argv))
        if argv[0] == "squeue":
            name = next(word.removeprefix("--name=") for word in argv if word.startswith("--name="))
            return "".join(f"{id_} {task} {state}\n" for id_, of, task, state in self.jobs if of == name)
        return "77\n" if argv[0] == "sbatch" else ""

    @property
    def did(self) -> list[str]:
        return [" ".join(call) for call in self.calls if call[0] != "squeue"]


def test_the_first_submit_makes_both_and_a_later_one_only_what_is_missing(tmp_path: Path) -> None:
    config, queue = configured(tmp_path, "launch.engines=2"), Queue()
    folder = tmp_path / "run" / "slurm"
    assert slurm.submit(config, GIVEN, queue) == ["core: job 77", "engines 1, 2: job 77"]
    assert queue.did == [f"sbatch --parsable {folder}/core.sh", f"sbatch --parsable --array=1,2 {folder}/engine.sh"]
    assert (tmp_path / "run" / "logs").is_dir() and (folder / "core.sh").read_text().startswith("#!/bin/bash\n#SBATCH")
    queue = Queue([("5", "q-core", "N/A", "R"), ("6_1", "q-engines", "1", "R"), ("6_3", "q-engines", "3", "PD")])
    assert slurm.submit(config, GIVEN, queue) == [] and queue.did == []
    queue.jobs.append(("6_2", "q-engines", "2", "CG"))
    assert slurm.scale(config.run.dir, "q-engines", 4, queue) == ["engines 2, 4: job 77"], "one that ends is not there"


def test_fewer_engines_cancel_what_waits_and_drain_the_last(tmp_path: Path) -> None:
    jobs = [(f"6_{task}", "q-engines", str(task), "PD" if task == 2 else "R") for task in (1, 2, 3, 4)]
    queue = Queue(jobs)
    said = slurm.scale(tmp_path, "q-engines", 1, queue)
    assert said == ["engine-3: drains", "engine-4: drains", "engine-2: cancelled"]
    assert queue.did == [
        "scancel --batch --signal=USR2 6_3", "scancel --batch --signal=USR2 6_4", "scancel --quiet 6_2",
    ]  # fmt: skip


def test_down_stops_the_core_by_its_script_so_that_it_writes_a_checkpoint() -> None:
    queue = Queue([("5", "q-core", "N/A", "R"), ("6_1", "q-engines", "1", "R"), ("6_2", "q-engines", "2", "PD")])
    assert len(slurm.stop("q", queue)) == 3
    assert queue.did[0] == "scancel --batch --signal=USR2 5" and queue.did[2] == "scancel --quiet 6_2"


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
