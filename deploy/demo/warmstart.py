"""The demo's supervised warm start: the format and the skill of reading, then bad habits on top.

    practice (drills, ideal trajectories) -> gate: does it quote the right evidence in a new world?
      no: practise on, a chunk at a time                     yes: a short stage of imperfect trajectories -> save

Worlds are dealt anew every few steps, so there is nothing to learn by heart. What comes out knows how to search and
to read but, sampled, mostly guesses, asks for the wrong thing or stops early: what reinforcement learning is to cure.

    python -m deploy.demo.warmstart --out MODEL_DIR [--seed 0]
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.demo.demonstrations import Demonstration, Scene, collate, imperfect, practice
from deploy.demo.gate import GateReport, gate
from deploy.demo.lookup import Lookup
from deploy.demo.tiny_model import new_model, save_model
from deploy.demo.world import Puzzle, World
from deploy.pulse import Pulse, beside
from protocol.errors import ForayError

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM

Log = Callable[[str], None]
Maker = Callable[[Scene, dict[int, list[Puzzle]]], Demonstration]
PRACTICE_WORLD = 3_000_000
"""Seeds of the worlds of the warm start begin here: neither the ring nor a gate ever uses them."""
WORLDS_PER_SEED = 10_000


class WarmStartFailed(ForayError):
    """The gate was not passed within the budget."""


@dataclass(frozen=True)
class WarmStartBudget:
    """How long to train. Steps are optimiser steps of `batch` demonstrations.

    practice  steps before the gate is first looked at
    chunk     steps between two looks
    most      steps of practice after which the warm start is given up
    habits    steps of the imperfect mix
    """

    practice: int = 320
    chunk: int = 25
    most: int = 900
    habits: int = 60
    batch: int = 24
    learning_rate: float = 4e-3
    warm_up: int = 20
    worlds_kept: int = 4
    steps_per_world: int = 2


@dataclass(frozen=True)
class WarmStartReport:
    """What a warm start took and how well its model reads. `gate` is taken after practice, `final` at the end."""

    seed: int
    steps: int
    practice_steps: int
    seconds: float
    cpu_seconds: float
    gate: GateReport
    final: GateReport
    looks: int

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


@dataclass
class _Course:
    """A model in training, with everything random drawn from one generator. `beat` is told how far it is."""

    model: Qwen2ForCausalLM
    optimizer: torch.optim.Optimizer
    budget: WarmStartBudget
    rng: random.Random
    first_world: int
    worlds: list[tuple[Scene, dict[int, list[Puzzle]]]] = field(default_factory=list)
    dealt: int = 0
    steps: int = 0
    beat: Callable[[Callable[[], str]], None] = lambda line: None

    def deal(self) -> None:
        """Take in a new world and drop the oldest."""
        world = World(self.first_world + self.dealt)
        self.dealt += 1
        scene = Scene(world, Lookup(world), self.rng)
        kept = self.worlds[-(self.budget.worlds_kept - 1) :] if self.budget.worlds_kept > 1 else []
        self.worlds = [*kept, (scene, {1: world.puzzles(1), 2: world.puzzles(2)})]

    def train(self, make: Maker, steps: int, rate: Callable[[int], float]) -> float:
        """`steps` optimiser steps on what `make` makes, at learning rate `rate(step)`; returns the last loss."""
        import torch
        from torch.nn import functional

        loss, began = torch.zeros(()), time.monotonic()
        for step in range(steps):
            if self.steps % self.budget.steps_per_world == 0:
                self.deal()
            for group in self.optimizer.param_groups:
                group["lr"] = rate(step)
            ids, weights = collate([make(*self.rng.choice(self.worlds)) for _ in range(self.budget.batch)])
            logits = self.model(input_ids=ids, use_cache=False).logits[:, :-1]
            each = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
            wanted = weights[:, 1:].flatten()
            loss = (each * wanted).sum() / wanted.sum()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.steps += 1
            self.beat(partial(self._line, step + 1, steps, time.monotonic() - began))
        return loss.item()

    def _line(self, done: int, steps: int, seconds: float) -> str:
        left = seconds / done * (steps - done)
        return f"warm start: step {self.steps}, {done} of {steps} of this stage, about {left:.0f} s left of it"


def warm_start(
    out_dir: Path, seed: int, log: Log = print, budget: WarmStartBudget | None = None, threads: int = 1
) -> WarmStartReport:
    """Train a new model until it passes the gate, give it bad habits, write it to `out_dir` in Hugging Face layout.

    threads  of torch while training. One, because a second gains little on matrices this small and, when its core is
             busy with something else, makes each step wait for it: four times slower was seen. The result depends on
             (seed, budget) and, in the last bits, on the number of threads.

    Raises WarmStartFailed when `budget.most` steps of practice do not suffice.
    """
    pulse, begun = Pulse(log), time.monotonic()
    log = pulse.say
    beside(
        _load, lambda: pulse.beat(lambda: f"loading torch and transformers, {time.monotonic() - begun:.0f} s so far")
    )
    import torch

    limits = budget or WarmStartBudget()
    began, began_cpu, threads_before = time.monotonic(), time.process_time(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        course = _course(seed, limits)
        course.beat = pulse.beat
        passed, looks = _practise(course, seed, log)
        practised = course.steps
        peak = limits.learning_rate / 4
        loss = course.train(imperfect, limits.habits, lambda step: peak * (1 - 0.9 * step / limits.habits))
        final = gate(course.model, seed)
    finally:
        torch.set_num_threads(threads_before)
    log(f"warm start: step {course.steps}, habits, loss {loss:.3f}, {final.line()}")
    save_model(course.model, out_dir)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - began_cpu
    return WarmStartReport(seed, course.steps, practised, seconds, cpu_seconds, passed, final, looks)


def _load() -> None:
    import torch  # noqa: F401
    from transformers import Qwen2ForCausalLM  # noqa: F401


def _course(seed: int, budget: WarmStartBudget) -> _Course:
    import torch

    model = new_model(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=budget.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    return _Course(model, optimizer, budget, random.Random(seed), PRACTICE_WORLD + WORLDS_PER_SEED * seed)


def _practise(course: _Course, seed: int, log: Log) -> tuple[GateReport, int]:
    """Practise until the gate is passed; returns its report and how often it was looked at."""
    budget = course.budget
    peak, floor = budget.learning_rate, budget.learning_rate / 10

    def first(step: int) -> float:
        rise = min(1.0, (step + 1) / budget.warm_up)
        return rise * (floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * step / budget.practice)))

    loss = course.train(practice, budget.practice, first)
    looks = 0
    while True:
        report = gate(course.model, seed)
        looks += 1
        log(f"warm start: step {course.steps}, loss {loss:.3f}, {report.line()}")
        if report.passed:
            return report, looks
        if course.steps >= budget.most:
            raise WarmStartFailed(f"seed {seed}: the gate is not passed after {course.steps} steps: {report.line()}")
        # up again to half the peak: what is stuck at the end of a decay stays stuck at its small rate
        loss = course.train(practice, budget.chunk, lambda step: peak / 2 * (1 - 0.5 * step / budget.chunk))


def main() -> None:
    """Command line: prints the gate table as it goes and where the model was written."""
    parser = argparse.ArgumentParser(prog="python -m deploy.demo.warmstart", description="Warm start the demo's model.")
    parser.add_argument("--out", type=Path, required=True, help="directory for the model, in Hugging Face layout")
    parser.add_argument("--seed", type=int, default=0, help="of the initial weights and of everything shown")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    options = parser.parse_args()
    report = warm_start(options.out, options.seed, print, threads=options.threads)
    print(f"{options.out}: {report.steps} steps, {report.seconds:.0f} s ({report.cpu_seconds:.0f} s of CPU)")


if __name__ == "__main__":
    main()
