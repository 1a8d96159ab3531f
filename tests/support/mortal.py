"""A learner with the real trainer that dies at a given point, and its successors, each in a separate process.

`python -m tests.support.mortal FILE...`: each FILE is JSON {"argv": [...], "fault": "place:step"}; for each, a process
runs `python -m learner` with these arguments, and kills itself (SIGKILL) at the fault. Prints one line of JSON, the
exit statuses (-9 where it was killed). What is heavy is imported once, before the processes are forked.

Faults, at optimiser step N:
    update:N     the weights have moved, and nothing says so yet
    journal:N    the step is in the journal, and not in the delivery state
    snapshot:N   the state is in main memory, nothing of it is written
    save:N       the checkpoint's state is written, by its thread, and its manifest is not
    rename:N     the checkpoint is in its place, CURRENT does not name it yet
    commit:N     the checkpoint is in force, nothing is acknowledged
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers

import learner.checkpoint.checkpoint
import learner.checkpoint.replay
import learner.trainer.trainer
from learner import cli
from learner.checkpoint.journal import GroupJournal
from learner.delivery.state import DeliveryState
from learner.engine import DeepSpeedEngine
from learner.engine.deepspeed import import_deepspeed


def die() -> None:
    """End like a process whose machine lost power."""
    os.kill(os.getpid(), signal.SIGKILL)


def after(owner: Any, name: str, fatal: Callable[..., bool]) -> None:
    """End the process after the call of `owner.name` for whose arguments `fatal` is true."""
    real = getattr(owner, name)

    def call(*args: Any, **more: Any) -> Any:
        result = real(*args, **more)
        if fatal(*args, **more):
            die()
        return result

    setattr(owner, name, call)


def install(fault: str) -> None:
    """Prepares this process for its death."""
    place, _, number = fault.partition(":")
    step = int(number)
    if place == "update":
        after(DeepSpeedEngine, "step", lambda self, *_: self.updates == step)
    elif place == "journal":
        after(GroupJournal, "append", lambda self, at, *_: at == step)
    elif place == "snapshot":
        after(learner.trainer.trainer.Trainer, "snapshot_state", lambda self, directory: self.updates == step)
    elif place == "save":
        snapshot = learner.trainer.trainer.Trainer.snapshot_state

        def fatal(self: learner.trainer.trainer.Trainer, directory: Path) -> Callable[[], None]:
            write, fatal = snapshot(self, directory), self.updates == step
            return lambda: die() if write() is None and fatal else None

        learner.trainer.trainer.Trainer.snapshot_state = fatal  # type: ignore[method-assign]
    elif place == "rename":
        real = learner.checkpoint.checkpoint.atomic_write

        def write(path: Path, text: str, **options: Any) -> None:
            if path.name == learner.checkpoint.checkpoint.CURRENT and text.startswith(f"step_{step}."):
                die()
            real(path, text, **options)

        learner.checkpoint.checkpoint.atomic_write = write
    elif place == "commit":
        after(DeliveryState, "mark_durable", lambda self, state: state["step"] == step)
    else:
        raise ValueError(fault)


def live(argv: list[str], fault: str) -> int:
    """Runs a learner in a process of its own; its exit status, negative for a signal."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if fault:
                install(fault)
            status = cli.main(argv)
        except BaseException:
            traceback.print_exc()  # os._exit prints nothing
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> int:
    import_deepspeed()
    _ = transformers.Qwen2ForCausalLM, transformers.AutoModelForCausalLM  # imported when they are named
    statuses = []
    for name in sys.argv[1:]:
        life = json.loads(Path(name).read_text())
        sys.stdout.flush()
        statuses.append(live(life["argv"], life["fault"]))
    print(json.dumps(statuses), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
