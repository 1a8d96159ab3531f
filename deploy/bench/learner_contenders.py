"""The parent's side of the learner benchmark: each contender is a child with a pipe, asked for a step at a time.

loop   consumes   produces              waits for          unblocked by
play   rounds     figures of a round    a child's line     the child, or its death
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from deploy.bench.base import Say
from deploy.bench.learner import TRL_VARIABLE, LearnerBench
from deploy.bench.learner_work import Work
from protocol.errors import ForayError, UserError

UNFUSED_MIB = 1 << 20
"""A chunk that holds the logits of any micro-batch."""
NAMES = ("unfused", "padded", "padded_sorted", "trl")


class Contender:
    """One child. Between its rounds it waits for a line and computes nothing."""

    def __init__(self, name: str, argv: Sequence[str], directory: Path, threads: int) -> None:
        self.name = name
        self._argv, self._log = argv, directory / f"{name}.log"
        self._env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}

    def __enter__(self) -> Contender:
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=self._env
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        # its input ends, and so does it; one that computes is not waited for
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # of a line that a dead child did not read
                pipe.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()

    def ready(self) -> None:
        """Waits until it has loaded everything. Raises ForayError when it died."""
        self._line()

    def round(self) -> dict[str, float]:
        """One step. Raises ForayError when the child died."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # said below
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        answer: dict[str, float] = self._line()
        return answer

    def _line(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise ForayError(f"{self.name} failed: {self._log.read_text()[-2000:].strip()}")
        return json.loads(line)


def contenders_of(settings: LearnerBench, work: Work, absent: dict[str, str]) -> list[Contender]:
    """Ours first, then the others; into `absent` goes who cannot take part, and why."""
    spec, directory = str(work.spec), work.spec.parent

    def module(name: str, *argv: str) -> tuple[str, ...]:
        return (sys.executable, "-m", f"deploy.bench.{name}", spec, *argv)

    commands = {
        "ours": module("learner_ours", str(settings.logit_chunk_mb)),
        "unfused": module("learner_ours", str(UNFUSED_MIB)),
        "padded": module("learner_padded", "arrival"),
        "padded_sorted": module("learner_padded", "sorted"),
    }
    if why := _no_trl(settings):
        absent["trl"] = why
    else:
        script = Path(__file__).with_name("learner_trl.py")
        commands["trl"] = (settings.trl_interpreter(), str(script), spec)
    wanted = [name.strip() for name in settings.only.split(",") if name.strip()] or list(NAMES)
    if unknown := sorted(set(wanted) - set(NAMES)):
        raise UserError(f"no contender is called {', '.join(unknown)}", todo=f"--only takes {', '.join(NAMES)}")
    # the ratio is against the plain loop, so that one always runs
    kept = [name for name in commands if name in {"ours", "padded", *wanted}]
    absent |= {name: "not asked for" for name in NAMES if name not in kept and name not in absent}
    return [Contender(name, commands[name], directory, settings.threads) for name in kept]


def _no_trl(settings: LearnerBench) -> str:
    python = settings.trl_interpreter()
    if not python:
        return f"no interpreter with TRL is given (--trl-python or {TRL_VARIABLE})"
    code = "from importlib.metadata import version; print(version('trl'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"{python} cannot be run: {error.strerror}"
    return "" if done.returncode == 0 else f"{python} has no TRL"


def play(settings: LearnerBench, contenders: Sequence[Contender], say: Say) -> list[dict[str, dict[str, float]]]:
    """[1 + rounds] name -> figures; the first round warms up."""
    rows = []
    with ExitStack() as stack:
        for contender in contenders:
            stack.enter_context(contender).ready()  # one after the other: loading all at once would need more memory
        for number in range(settings.rounds + 1):
            rows.append({contender.name: contender.round() for contender in contenders})
            shown = ", ".join(f"{kind} {figures['tokens_per_s']:.0f}" for kind, figures in rows[-1].items())
            say(f"{f'round {number}' if number else 'warm-up'}, trained tokens/s: {shown}")
    return rows
