"""Every kind of process is lost with its host and started elsewhere; the ranks of a learner are one group."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.config import load_config
from deploy.hardware.assign import needs, place
from deploy.hardware.inventory import HARDWARE
from deploy.launch.plan import HOST, KINDS, ProcessSpec, plan
from deploy.launch.process import ProcessFailed
from deploy.launch.supervisor import Supervisor
from deploy.run.addresses import preview
from foray.cli import main
from foray.commands.init import PRESETS
from tests.support.two_hosts import FIRST, SECOND, TwoHosts
from tests.support.waiting import wait_until

SPEAK = (
    "import os, signal, sys, time\n"
    "rank, meeting = os.environ.get('RANK', ''), os.environ.get('MASTER_PORT', '')\n"
    "if rank not in ('', '0'): signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "print('up', sys.argv[1], rank, os.environ.get('MASTER_ADDR', ''), meeting, flush=True)\n"
)
"""As the real ones: another rank than the first leaves SIGTERM to it."""
STAY = SPEAK + "time.sleep(60)"


def specs(tmp_path: Path, code: str = STAY, *overrides: str) -> list[ProcessSpec]:
    """The planned processes of a run, each of them a tiny program."""
    config = load_config(None, [f"run.dir={tmp_path}", "launch.restarts=1", "launch.restart_learner=1", *overrides])
    argv = (sys.executable, "-c", code, HOST)
    found = plan(config, preview(config, environ={}), python="py", resolved=tmp_path / "resolved.yaml")
    return [replace(spec, argv=argv) for spec in found]


def lines(spec: ProcessSpec) -> list[list[str]]:
    return [line.split() for line in spec.log.read_text().splitlines()] if spec.log.exists() else []


@pytest.fixture
def hosts() -> TwoHosts:
    return TwoHosts()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def supervisor(hosts: TwoHosts, said: list[str]) -> Iterator[Supervisor]:
    ready = lambda spec: bool(lines(spec))  # noqa: E731
    made = Supervisor(is_ready=ready, ready_s=10, shutdown_s=0.5, say=said.append, backend=hosts)
    yield made
    made.hurry()
    made.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_whose_host_is_lost_starts_on_the_other_and_it_does_not_count(
    tmp_path: Path, kind: str, supervisor: Supervisor, hosts: TwoHosts, said: list[str]
) -> None:
    (spec,) = [replace(spec, restarts=0) for spec in specs(tmp_path) if spec.kind == kind]
    supervisor.spawn(spec)
    supervisor.await_ready([spec.name])
    hosts.lose(FIRST)
    wait_until(lambda: supervisor.check() is None and len(lines(spec)) == 2, "it is started again")
    assert [line[1] for line in lines(spec)] == [FIRST, SECOND] and supervisor.children[spec.name].host == SECOND
    assert supervisor.restarts == {spec.name: 1}
    assert f"{spec.name} was lost with its host {FIRST}: restarting it (this does not count)" in " ".join(said)
    supervisor.children[spec.name].kill()
    with pytest.raises(ProcessFailed, match=f"{spec.name} was killed by SIGKILL"):
        wait_until(lambda: supervisor.check() is not None, "its own end counts")


def ranks(tmp_path: Path, code: str = STAY, number: int = 2) -> list[ProcessSpec]:
    return [spec for spec in specs(tmp_path, code, f"launch.learner_ranks={number}") if spec.kind == "learner"]


def test_a_lost_rank_restarts_all_ranks_once_where_there_is_room(
    tmp_path: Path, supervisor: Supervisor, hosts: TwoHosts, said: list[str]
) -> None:
    first, second = group = ranks(tmp_path)
    supervisor.spawn(*group)
    supervisor.await_ready([first.name, second.name])
    assert [child.host for child in supervisor.children.values()] == [FIRST, SECOND]
    hosts.lose(SECOND)
    wait_until(lambda: supervisor.check() is None and len(lines(second)) == 2, "both are started again")
    wait_until(lambda: len(lines(first)) == 2, "rank 0 too")
    assert supervisor.restarts == {"learner": 1} and "restarting all 2 ranks (this does not count)" in said[-1]
    assert [child.host for child in supervisor.children.values()] == [FIRST, FIRST]
    (_, _, rank, address, port), (_, _, other, same_address, same_port) = lines(first)[-1], lines(second)[-1]
    assert (rank, other, address, port) == ("0", "1", same_address, same_port) and address == FIRST
    assert port != lines(first)[0][4], "the old port may still be taken"


def test_a_rank_that_fails_counts_once_for_the_group_and_is_the_one_that_is_reported(
    tmp_path: Path, supervisor: Supervisor, said: list[str]
) -> None:
    first, second, third = group = ranks(tmp_path, number=3)
    supervisor.spawn(*group)
    supervisor.await_ready([spec.name for spec in group])
    os.kill(supervisor.children[second.name].pid, signal.SIGKILL)
    wait_until(lambda: supervisor.check() is None and len(lines(third)) == 2, "all are started again")
    assert supervisor.restarts == {"learner": 1} and "all 3 ranks (1 of 1 per hour)" in said[-1]
    wait_until(lambda: len(lines(first)) == len(lines(second)) == 2, "they are up")
    os.kill(supervisor.children[second.name].pid, signal.SIGKILL)
    with pytest.raises(ProcessFailed, match=r"learner-rank-1 was killed by SIGKILL.* \(after 1 restarts") as failure:
        wait_until(lambda: supervisor.check() is not None, "the second time is one too many")
    assert failure.value.log == second.log
    assert all(child.poll() is not None for child in supervisor.children.values()), "none is left"


@pytest.mark.parametrize("code", [2, 65, 75])
def test_the_code_of_several_ranks_is_that_of_rank_0_if_it_says_what_to_do(
    tmp_path: Path, supervisor: Supervisor, code: int
) -> None:
    """Rank 1 may end first, because rank 0 is leaving."""
    group = ranks(tmp_path, SPEAK + f"time.sleep(.2) if rank == '0' else None; sys.exit({code} if rank == '0' else 1)")
    supervisor.spawn(*(replace(spec, restarts=5) for spec in group))
    with pytest.raises(ProcessFailed) as failure:
        wait_until(lambda: supervisor.check() is not None, "the end is seen")
    assert (failure.value.name, failure.value.exit_code) == ("learner", code) and not supervisor.restarts


def test_a_learner_has_finished_when_rank_0_has_whatever_the_others_do(tmp_path: Path, supervisor: Supervisor) -> None:
    group = ranks(tmp_path, SPEAK + "sys.exit(int(rank))")
    supervisor.spawn(*group)
    wait_until(lambda: all(child.poll() is not None for child in supervisor.children.values()), "both have ended")
    supervisor.check()
    assert supervisor.ended("learner") and not supervisor.restarts


def test_the_dry_run_shows_host_and_gpus_of_each_process_on_two_hosts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = {"launch.hardware": "2x8xh100", "launch.engines": 7, "launch.learner_ranks": 4}
    given = [f"run.dir={tmp_path}/run", *(f"{name}={value}" for name, value in facts.items())]
    assert main(["up", str(PRESETS / "search_r1_grpo.yaml"), "--dry-run", *given]) == 0
    out = capsys.readouterr().out.splitlines()
    found = [line.split("host ")[1].split(";")[:2] for line in out if line.startswith("#     host ")]
    assert found == [
        *([["host-1", " GPUs none"]] * 2),
        *([["host-1", f" GPUs {gpu}"] for gpu in range(7)]),
        ["host-1", " GPUs none"],
        ["host-1", " GPUs 7"],
        *([["host-2", f" GPUs {gpu}"] for gpu in range(3)]),
    ]


def test_ranks_divide_the_gpus_of_the_learner_over_the_hosts() -> None:
    config = load_config(PRESETS / "search_r1_grpo.yaml", ["launch.engines=5", "launch.learner_ranks=8"])
    found = place(config, HARDWARE["2x8xh100"], needs(config, {}))
    there = [found.of("learner", "learner", rank, 8) for rank in range(8)]
    assert [place.host for place in there] == ["host-1"] * 3 + ["host-2"] * 5
    assert [place.environment["CUDA_VISIBLE_DEVICES"] for place in there] == list("56701234")
    assert {place.need.gpus for place in there} == {1}
