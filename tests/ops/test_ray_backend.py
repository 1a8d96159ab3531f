"""Tiny processes on a Ray cluster of four nodes, a minute or two: whatever is lost comes back elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.ops.ray_nodes import is_alive, parent, ray_nodes
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.ops, pytest.mark.slow, pytest.mark.timeout(1500)]


def test_actors_ranks_and_nodes_come_back_and_nothing_outlives_the_driver(tmp_path: Path) -> None:
    python = os.environ.get("FORAY_RAY_PYTHON", "")
    if not python:
        pytest.skip("FORAY_RAY_PYTHON names no Python with Ray: `make test-ops` does that")
    said, directory = tmp_path / "driver.log", tmp_path / "run"
    directory.mkdir()

    def state() -> dict[str, list[Any]]:
        """Name -> [pid, host, restarts]."""
        lines = [line for line in said.read_text().splitlines() if line.startswith('{"')]
        found: dict[str, list[Any]] = json.loads(lines[-1]) if lines else {}
        return found

    def until(condition: Any, what: str) -> None:
        wait_until(
            lambda: state() and all(one[0] for one in state().values()) and condition(), what, 300, said.read_text
        )

    with ray_nodes(Path(python), tmp_path) as nodes:
        nodes.add(11, 1)
        argv = [nodes.python, "-m", "tests.ops.ray_driver", directory]
        with said.open("wb") as log, subprocess.Popen(argv, stdout=log, stderr=log, env=nodes.env) as driver:
            wait_until(lambda: "waiting for room: learner needs" in said.read_text(), "nodes are waited for", 300)
            nodes.add(12, 1)
            nodes.add(13, 2, without=directory)
            until(lambda: len(state()) == 5, "all run")
            start = state()
            assert {name: one[1][-2:] for name, one in start.items()} == {
                **{"redis": "11", "learner": "11", "learner-rank-1": "12", "engine-1": "13", "retriever-1": "13"}
            }

            os.kill(parent(start["engine-1"][0]), signal.SIGKILL)
            until(lambda: state()["engine-1"][2] == 1, "the process of a killed actor is back")
            assert not is_alive(start["engine-1"][0]), "it has ended with its actor"

            os.kill(start["learner-rank-1"][0], signal.SIGKILL)
            until(lambda: state()["learner"][2] == 1, "both ranks are back")
            assert not is_alive(start["learner"][0])

            nodes.add(14, 2, without=directory)
            nodes.lose(13)
            until(lambda: {state()[n][1] for n in ("engine-1", "retriever-1")} == {"127.0.0.14"}, "both have moved")
            for name in ("engine-1", "retriever-1"):
                line = f"{name} was lost with its host 127.0.0.13: restarting it (this does not count)"
                assert line in said.read_text()

            driver.send_signal(signal.SIGUSR1)
            wait_until(lambda: "engine-2" in state(), "another engine waits for room", 300, said.read_text)
            assert state()["engine-2"][0] == 0, "node 14 is full, and the others are supervised meanwhile"
            nodes.add(15, 1)
            until(lambda: state()["engine-2"][1] == "127.0.0.15", "it runs on a node that joined")
            driver.send_signal(signal.SIGUSR2)
            until(lambda: "engine-2" not in state(), "it has left")
            driver.send_signal(signal.SIGUSR1)
            until(lambda: "engine-2" in state(), "there is room again")

            left = [one[0] for one in state().values()]
            assert all(map(is_alive, left))
            driver.kill()
        wait_until(lambda: not any(map(is_alive, left)), "no process outlives the driver", 60)
    ranks = [(directory / "logs" / f"{name}.log").read_text().splitlines() for name in ("learner", "learner-rank-1")]
    first, second = ([line.split()[-2:] for line in lines if line.startswith("up")] for lines in ranks)
    assert first == second and first[0] != first[1], "ranks meet, at another port the second time"
    seen = [line.split()[1:] for line in (directory / "logs" / "engine-1.log").read_text().splitlines()]
    assert not any(word.startswith("RAY_") for words in seen for word in words), "variables of Ray's own workers"
