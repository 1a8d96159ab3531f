"""A process that has imported everything and becomes each process of the run by forking: a restart in milliseconds.

Run as a program by forks.py. Reads lines of JSON from stdin, `{"ask": n, "module": "learner", "argv": [...], "log":
path, "env": {...}, "wrong": [...]}`, and answers `{"ask": n, "pid": p}`; says `{"pid": p, "status": s}` when a child
has ended (negative: by that signal). `wrong` names the faults of the control and the hooks that are built into that
child (tests/chaos/control.py). A `module` that ends in .py is the path of a program. With LD_PRELOAD in `env` the child
executes Python again, because a library cannot be preloaded into a running process.

A child runs the product's own `main(argv)`, or the program, in a session of its own, and dies with the zygote, which
dies with the driver: no process is left behind. What it shares with a real start is everything but the imports.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from typing import Any

PR_SET_PDEATHSIG = 1
MAIN = {
    "learner": "learner.cli",
    "rollout_server": "rollout_server.cli",
    "rollout_server.node": "rollout_server.node.cli",
    "retriever": "retriever.cli",
}
POLL_MS = 20


def import_everything() -> None:
    """What each process would import by itself, and nothing that starts a thread."""
    import transformers

    from learner.engine.deepspeed import import_deepspeed

    import_deepspeed()
    _ = transformers.Qwen2ForCausalLM, transformers.AutoModelForCausalLM  # imported when they are named
    for name in (
        *MAIN.values(),
        "learner.main",
        "learner.trainer.trainer",
        "learner.weights.disk",
        "rollout_server.server",
    ):
        importlib.import_module(name)
    for name in (
        "rollout_server.node.server",
        "rollout_server.cpu_engine.server.app",
        "retriever.server",
        "retriever.index.bm25",
    ):
        importlib.import_module(name)


def become(order: dict[str, Any], parent: int) -> None:
    """In the fork: turn into the process. Never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(order["env"])
        os.chdir(order["cwd"])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
        if "LD_PRELOAD" in order["env"]:
            order["main"] = MAIN[order["module"]]
            os.execv(sys.executable, [sys.executable, f"{order['control']}/hooks.py", json.dumps(order)])
        if order["wrong"]:
            sys.path.append(order["control"])
            importlib.import_module("control").install(order["wrong"])
        sys.argv = [order["module"], *order["argv"]]
        if order["module"].endswith(".py"):
            runpy.run_path(order["module"], run_name="__main__")
            status = 0
        elif order["module"] not in MAIN:
            runpy.run_module(order["module"], run_name="__main__")
            status = 0
        else:
            status = importlib.import_module(MAIN[order["module"]]).main(order["argv"])
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()  # os._exit prints nothing
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def reap(say: Any) -> None:
    """Report the children that have ended."""
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        say({"pid": pid, "status": os.waitstatus_to_exitcode(raw)})


def main() -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what the imports print is no answer

    def say(message: dict[str, Any]) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    import_everything()
    say({"ready": os.getpid()})
    poll, held = select.poll(), b""
    poll.register(0, select.POLLIN | select.POLLHUP)
    me = os.getpid()
    while True:
        if poll.poll(POLL_MS):
            data = os.read(0, 65536)
            if not data:
                return 0  # the driver has gone
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    become(order, me)
                say({"ask": order["ask"], "pid": pid})
        reap(say)


if __name__ == "__main__":
    sys.exit(main())
