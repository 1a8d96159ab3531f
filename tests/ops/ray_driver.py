"""The driver of tests/ops/test_ray_backend.py, in the Python that has Ray: supervises tiny processes on a Ray cluster.

Prints what the Supervisor says, and a line of JSON, name -> [pid, host, restarts], whenever that changes.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import replace
from itertools import groupby
from pathlib import Path

from deploy.config import load_config
from deploy.launch.launcher import open_backend
from deploy.launch.plan import HOST, plan
from deploy.launch.process import ProcessFailed
from deploy.launch.scale import with_engines
from deploy.launch.supervisor import Supervisor
from deploy.run.addresses import preview
from deploy.run.run_dir import hold
from protocol.runtime.files import atomic_write
from protocol.runtime.progress import Progress

TINY = (
    "import os, sys, time\n"
    "print('up', *sys.argv[1:], *(os.environ.get(n, '') for n in ('RANK', 'MASTER_ADDR', 'MASTER_PORT')), flush=True)\n"
    "ours = [n for n in os.environ if n.startswith(('RAY_', 'FORAY_'))]; print('env', *ours, flush=True)\n"
    "time.sleep(600)"
)


def main(directory: Path) -> int:
    """Supervise until the process is killed; 1 if a process failed for good."""

    def say(line: str) -> None:
        print(line, flush=True)

    given = [f"run.dir={directory}", "launch.backend=ray", "launch.learner_ranks=2", "launch.rollouts=0"]
    config = load_config(None, given)
    with hold(directory):
        backend = open_backend(config, Progress.of(say))
        resolved = directory / "resolved.yaml"
        atomic_write(resolved, config.to_yaml(), durable=False)
        where = preview(config, environ={})
        specs = plan(config, where, python="py", resolved=resolved, placement=backend.place(config))
        supervisor = Supervisor(is_ready=lambda spec: True, ready_s=60, shutdown_s=3, say=say, backend=backend)
        # the path of the configuration stays: the actors write that file on their hosts
        argv = (sys.executable, "-c", TINY, HOST, "--config", str(resolved))
        tiny = [replace(spec, argv=argv) for spec in specs]
        for _, group in groupby(tiny, key=lambda spec: spec.group or spec.name):
            supervisor.spawn(*group)
        shown, asked = "", list[int]()
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda number, frame: asked.append(number))
        try:
            while True:
                supervisor.check()
                match asked and asked.pop():
                    case signal.SIGUSR1:  # `foray scale engines=2`
                        larger = with_engines(config, 2)
                        placement = backend.place(larger)
                        more = plan(larger, where, python="py", resolved=resolved, placement=placement)
                        supervisor.spawn(*(replace(spec, argv=argv) for spec in more if spec.name == "engine-2"))
                    case signal.SIGUSR2:  # `foray scale engines=1`
                        supervisor.stop(["engine-2"])
                        backend.release("engine-2")
                restarts = supervisor.restarts
                now = {n: [c.pid, c.host, restarts.get(c.spec.group or n, 0)] for n, c in supervisor.children.items()}
                if (line := json.dumps(now)) != shown:
                    shown = line
                    say(line)
                time.sleep(0.1)
        except ProcessFailed as failure:
            say(failure.render())
            return 1
        finally:
            supervisor.stop()
            backend.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
