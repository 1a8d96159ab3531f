"""A Ray cluster of several nodes on this machine, each with a loopback address, for `make test-ops`."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.runtime.net import free_port

ROOT = Path(__file__).parents[2]
PATIENT = {
    "RAY_raylet_start_wait_time_s": "300",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "300",
    "RAY_agent_register_timeout_ms": "300000",
}
"""A shared machine with two cores starts a node slowly."""
TRIES, TRY_S = 3, 200.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}


class RayNodes:
    """Nodes by the last number of their address; the first one is the head. `hidden`: a folder that others lack."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self._folder = python, folder
        self.address = f"127.0.0.11:{free_port('127.0.0.11')}"
        packages = sysconfig.get_paths()["purelib"]
        self.env = os.environ | PATIENT | QUIET | {"PYTHONPATH": f"{ROOT}:{packages}", "RAY_ADDRESS": self.address}
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._agents: dict[int, str] = {}
        """Port of the agent of each node."""

    def add(self, number: int, cpus: int, *, without: Path | None = None) -> None:
        """Start a node, whose processes do not see the files of the folder `without`."""
        place = [f"--address={self.address}"]
        if number == 11:
            place = ["--head", f"--port={self.address.partition(':')[2]}", "--include-dashboard=false"]
        argv = [self.python, "-m", "ray.scripts.scripts", "start", *place, f"--node-ip-address=127.0.0.{number}"]
        argv += [f"--num-cpus={cpus}", "--num-gpus=0", "--object-store-memory=80000000"]
        # given, so that a node need not learn them from its agents within 15 s, which a busy machine does not give them
        agents = ("dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent", "metrics-export")
        ports = [str(free_port(f"127.0.0.{number}")) for _ in agents]
        self._agents[number] = ports[0]
        argv += [f"--{agent}-port={port}" for agent, port in zip(agents, ports, strict=True)]
        argv += ["--block", "--disable-usage-stats"]
        if without is not None:
            hide = f'mount -t tmpfs none "{without}" && exec "$@"'
            argv = ["unshare", "--mount", "--fork", "--kill-child", "sh", "-c", hide, "sh", *argv]
        env = {name: value for name, value in self.env.items() if name != "RAY_ADDRESS"}
        for _ in range(TRIES):
            with (self._folder / f"node-{number}.log").open("wb") as log:
                self._nodes[number] = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
                )
            if self._is_up(number):
                return
            self.lose(number)
        raise AssertionError((self._folder / f"node-{number}.log").read_text())

    def _is_up(self, number: int) -> bool:
        path, deadline = self._folder / f"node-{number}.log", time.monotonic() + TRY_S
        while "--block" not in path.read_text(errors="replace"):
            for raylet in map(options, children(self._nodes[number].pid)):
                if raylet.get("session_dir") and raylet.get("node_id"):  # the port that `ray start` does not pass on
                    port = Path(raylet["session_dir"]) / f"dashboard_agent_listen_port_{raylet['node_id']}"
                    if not port.exists():
                        port.write_text(self._agents[number])
            if time.monotonic() > deadline or self._nodes[number].poll() is not None:
                return False
            time.sleep(0.2)
        return True

    def lose(self, number: int) -> None:
        """Kill every process of a node at once."""
        node = self._nodes.pop(number)
        os.killpg(node.pid, signal.SIGKILL)
        node.wait(30)

    def knows_lost(self, number: int) -> bool:
        """Return whether the head knows that a node is lost. Until then it places processes there, and moves them."""
        code = "import ray; ray.init(logging_level='ERROR'); print(*(n['NodeName'] for n in ray.nodes() if n['Alive']))"
        argv = [self.python, "-c", code]
        alive = subprocess.run(argv, env=self.env, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout
        return f"127.0.0.{number}" not in alive.split()

    def close(self) -> None:
        """End all nodes, the head last."""
        for number in sorted(self._nodes, reverse=True):
            self.lose(number)


@contextmanager
def ray_nodes(python: Path, folder: Path) -> Iterator[RayNodes]:
    """Yield a cluster without a node, and end its nodes afterwards."""
    cluster = RayNodes(python, folder)
    try:
        yield cluster
    finally:
        cluster.close()


def children(pid: int) -> list[int]:
    """Return the processes below `pid`."""
    try:
        own = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
    except OSError:  # it, or one of its threads, has ended
        return []
    return [*own, *(below for child in own for below in children(child))]


def options(pid: int) -> dict[str, str]:
    """Return the options of a process by their names, {} if it has ended."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return {}
    found = (word.lstrip("-").partition("=") for word in words if word.startswith("--"))
    return {name.replace("-", "_"): value for name, _, value in found}


def is_alive(pid: int) -> bool:
    """Return whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def parent(pid: int) -> int:
    """Return the process id of its parent."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
