"""`foray bench learner`: trained tokens/s of the learner, against a padded transformers loop and against TRL.

Each contender runs the same GRPO step from the same weights on the same trajectories, in its own process, in
alternating rounds: Foray (the real Trainer: packed rows, logits of trained tokens only and in chunks, DeepSpeed), Foray
with all logits at once, a plain loop with padding (in order of arrival, and sorted by length), and TRL's GRPOTrainer if
an environment has it. Losses and gradient norms of the first round must agree, or nothing is reported. The ratio is
Foray against the better of the plain loops. In the default model the output layer has the same share of all matrix
products as in Qwen2.5-1.5B: only Foray skips logits of untrained tokens, so a larger vocabulary would favour it.

Each contender is a child process that receives one step at a time over a pipe.

loop   consumes   produces              waits for          unblocked by
play   rounds     figures of a round    a child's line     the child, or its death
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from benchmarks.base import BenchResult, Say
from benchmarks.learner.settings import TRL_VARIABLE, LearnerBench
from benchmarks.learner.workload import LearnerWorkload
from deploy.hardware.gpus import without_cuda
from protocol.errors import ForayError, UserError

UNFUSED_MIB = 1 << 20
"""A chunk size that holds the logits of any micro-batch."""
NAMES = ("unfused", "padded", "padded_sorted", "trl")
VARIANTS = {
    "unmeasured": {"rescored_share": 0},
    "preserve": {"algorithm": {"preserve": {"coefficient": 1e-9, "threshold": 0, "answer_weight": "searches"}}},
}
"""Foray with other settings, only if named: without the change of log-probs over a step; with a penalty on falling
ones, whose coefficient leaves the loss as it is."""
KEPT = {"kept_with_signs": ("ours", "unmeasured"), "kept_with_preserve": ("preserve", "unmeasured")}
"""Share of the trained tokens/s that is kept -> the two contenders, compared in each round."""


class Contender:
    """One child process. Between rounds it waits for a line and computes nothing."""

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
        # it exits at the end of its input; do not wait for one that computes
        assert self._process.stdin is not None and self._process.stdout is not None
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):  # of a line that a dead child did not read
                pipe.close()
        if kind is not None:
            self._process.kill()
        self._process.wait()

    def ready(self) -> None:
        """Wait until it has loaded everything. Raises ForayError if it exited."""
        self._line()

    def round(self) -> dict[str, float]:
        """Run one step and return its figures. Raises ForayError if the child exited."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # reported below
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


def contenders_of(settings: LearnerBench, work: LearnerWorkload, absent: dict[str, str]) -> list[Contender]:
    """Return the contenders, Foray first. Add those that cannot run to `absent`, with the reason."""
    spec, directory = str(work.spec), work.spec.parent

    def module(name: str, *argv: str) -> tuple[str, ...]:
        return (sys.executable, "-m", f"benchmarks.learner.{name}", spec, *argv)

    commands = {
        "ours": module("ours", str(settings.logit_chunk_mb)),
        "unfused": module("ours", str(UNFUSED_MIB)),
        **{name: module("ours", str(settings.logit_chunk_mb), json.dumps(v)) for name, v in VARIANTS.items()},
        "padded": module("baselines", "arrival"),
        "padded_sorted": module("baselines", "sorted"),
    }
    if why := _no_trl(settings):
        absent["trl"] = why
    else:
        script = Path(__file__).with_name("trl_baseline.py")
        commands["trl"] = (settings.trl_interpreter(), str(script), spec)
    wanted = [name.strip() for name in settings.only.split(",") if name.strip()] or list(NAMES)
    if unknown := sorted(set(wanted) - {*NAMES, *VARIANTS}):
        known = ", ".join((*NAMES, *VARIANTS))
        raise UserError(f"unknown contenders: {', '.join(unknown)}", todo=f"--only takes {known}")
    # the ratio is against the plain loop, so it always runs
    kept = [name for name in commands if name in {"ours", "padded", *wanted}]
    absent |= {name: "not selected" for name in NAMES if name not in kept and name not in absent}
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
    """Return name -> figures for 1 + rounds rounds; the first is the warm-up.

    On a GPU, which has no room for all, one contender runs all its rounds before the next starts.
    """
    rows: list[dict[str, dict[str, float]]] = []
    if len(contenders) > 1 and not without_cuda():
        alone = [play(settings, [contender], say) for contender in contenders]
        return [
            {kind: figures for row in round_ for kind, figures in row.items()} for round_ in zip(*alone, strict=True)
        ]
    with ExitStack() as stack:
        for contender in contenders:
            stack.enter_context(
                contender
            ).ready()  # one after another: loading all at the same time would need more memory
        for number in range(settings.rounds + 1):
            rows.append({contender.name: contender.round() for contender in contenders})
            shown = ", ".join(f"{kind} {figures['tokens_per_s']:.0f}" for kind, figures in rows[-1].items())
            say(f"{f'round {number}' if number else 'warm-up'}, trained tokens/s: {shown}")
    return rows


ORDER = {"padded": "trajectories as they came", "padded_sorted": "sorted by length"}
"""Contender -> order of the trajectories in the plain loop."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}
"""Maximum difference of gradient norms of the same step, relative to the largest."""


def measure(bench: LearnerBench, say: Say) -> BenchResult:
    """Write model and batch, start all contenders, run their rounds in turn, and stop them."""
    from benchmarks.learner.workload import write_work

    absent: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="foray-bench-") as name:
        work = write_work(bench, Path(name))
        say(f"{work.facts['trajectories']:g} trajectories, {work.facts['tokens_trained']:g} trained tokens")
        contenders = contenders_of(bench, work, absent)
        for missing, why in absent.items():
            say(f"{missing} is skipped: {why}")
        rows = play(bench, contenders, say)
    refuse_other_work(bench, rows[0])
    figures = {kind: _figures([row[kind] for row in rows]) for kind in rows[0]}
    ours = figures.pop("ours")
    best = max((kind for kind in figures if kind.startswith("padded")), key=lambda kind: figures[kind]["tokens_per_s"])
    baseline = figures.pop(best)
    return BenchResult(
        value=ours["tokens_per_s"],
        unit="trained tokens/s",
        baseline={"name": f"padded transformers loop, {ORDER[best]}", **baseline},
        ratio=ours["tokens_per_s"] / baseline["tokens_per_s"],
        details={
            "ours": ours,
            **figures,
            **{f"ratio_{kind}": ours["tokens_per_s"] / f["tokens_per_s"] for kind, f in figures.items()},
            **kept(rows),
            "cpu_ratio": _against(ours, {best: baseline, **figures}, "cpu_ms_per_token"),
            "step_memory_ratio": _against(ours, {best: baseline, **figures}, "step_mib"),
            "absent": absent,
            **work.facts,
        },
    )


def refuse_other_work(bench: LearnerBench, row: dict[str, dict[str, float]]) -> None:
    norms = {kind: figures["grad_norm"] for kind, figures in row.items()}
    losses = {kind: figures["loss"] for kind, figures in row.items()}
    tolerance = TOLERANCE[bench.dtype]
    apart = max(norms.values()) - min(norms.values())
    if apart > tolerance * max(norms.values()) or max(losses.values()) - min(losses.values()) > tolerance:
        raise ForayError(f"the contenders disagree: losses {losses}, gradient norms {norms}")


def kept(rows: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return KEPT as medians over the rounds, without those whose contenders have not run."""
    return {
        name: median(row[one]["tokens_per_s"] / row[other]["tokens_per_s"] for row in rows[1:])
        for name, (one, other) in KEPT.items()
        if {one, other} <= rows[0].keys()
    }


def _against(ours: dict[str, float], others: dict[str, dict[str, float]], what: str) -> dict[str, float]:
    """Return the factor by which each of `others` uses more of `what`."""
    return {kind: figures[what] / ours[what] for kind, figures in others.items()}


def _figures(rows: list[dict[str, float]]) -> dict[str, float]:
    """Return the medians over one contender's rounds; loss and norm are of the first. Memory is the peak, `step_mib`
    the part that training added to the loaded model.
    """
    first = {name: rows[0][name] for name in ("loss", "grad_norm", "start_mib")}
    medians = {name: median(row[name] for row in rows[1:]) for name in rows[0] if name not in {*first, "peak_mib"}}
    peak = max(row["peak_mib"] for row in rows)
    return medians | first | {"peak_mib": peak, "step_mib": peak - first["start_mib"]}
