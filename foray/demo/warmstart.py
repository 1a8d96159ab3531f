"""The demo's supervised warm start: first format and reading, then bad habits.

    practice (drills, ideal trajectories) -> gate: does it quote the right evidence in a new world?
      no: practise another chunk                             yes: a short stage of imperfect trajectories -> save

New worlds are drawn every few steps, so there is nothing to memorise. The resulting model can search and read but,
sampled, mostly guesses, sends the wrong query or stops early. Reinforcement learning removes these habits.

The warm start of the hard demo has no second stage: it ends when both skills, querying and reading, are within `BAND`.

    python -m foray.demo.warmstart --out MODEL_DIR [--seed 0]
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

from foray.demo.demonstrations import Demonstration, Scene, collate, ideal, imperfect, practice
from foray.demo.world import (
    EOS,
    HARD,
    ONE_HOP,
    PAD,
    RELATION_NAMES,
    SHORT,
    Level,
    Lookup,
    Puzzle,
    ids_of_words,
    save_tokenizer,
)
from protocol.errors import ForayError
from protocol.runtime.progress import Progress, TaskProgress

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import Qwen2ForCausalLM


GATE_WORLD = 2_000_000
"""First seed of the worlds for gates; none is trained on."""
WORST_AT_LEAST = 0.90
MEAN_AT_LEAST = 0.96
BAND = (0.6, 0.8)
"""Mean share of right queries, and of right evidence, with which the warm start of the hard demo ends."""


@dataclass(frozen=True)
class GateReport:
    """Share of steps, by relation, with exactly the right evidence and the right query."""

    evidence: dict[str, float]
    query: dict[str, float]
    hard: bool = False

    @property
    def worst(self) -> float:
        """Return the lowest share over all relations, evidence and query."""
        return min(*self.evidence.values(), *self.query.values())

    @property
    def mean(self) -> float:
        """Return the mean share of right evidence."""
        return sum(self.evidence.values()) / len(self.evidence)

    @property
    def query_mean(self) -> float:
        """Return the mean share of right queries."""
        return sum(self.query.values()) / len(self.query)

    @property
    def passed(self) -> bool:
        """Return whether every relation is read well; hard: whether both skills are within `BAND`."""
        if self.hard:
            return all(BAND[0] <= skill <= BAND[1] for skill in (self.query_mean, self.mean))
        return self.worst >= WORST_AT_LEAST and self.mean >= MEAN_AT_LEAST

    def line(self) -> str:
        """Return one line for a log."""
        table = " ".join(f"{relation} {share:.2f}" for relation, share in self.evidence.items())
        return f"evidence {table}; query {min(self.query.values()):.2f}, mean {self.query_mean:.2f}"


def gate(model: Qwen2ForCausalLM, seed: int, asked: int = 32, topk: int = 2, level: Level = SHORT) -> GateReport:
    """Evaluate on a new world, teacher-forced and greedy: `asked` questions per relation, `topk` passages.

    It is measured per relation, because the typical failure is a single relation whose values the model recites from
    memory instead of copying. Reinforcement learning cannot repair that: the right value is never sampled. The accuracy
    of the answer is not informative (the answer only copies the quote).

    Hard: the questions have all depths, and the verb counts as evidence, because the other passages contain it too.
    """
    import torch

    world = level.world(GATE_WORLD + seed)
    scene = Scene(world, Lookup(world), random.Random(seed))
    puzzles = _examined(scene, asked, level)
    shown = [ideal(scene, puzzle, topk) for puzzle in puzzles]
    ids, _ = collate(shown)
    with torch.no_grad():
        said = model(input_ids=ids, use_cache=False).logits.argmax(-1)
    right = (said[:, :-1] == ids[:, 1:]).tolist()
    verb = 1 if level is HARD else 0
    evidence: dict[str, list[bool]] = {}
    queries: dict[str, list[bool]] = {}
    for row, one, puzzle in zip(right, shown, puzzles, strict=True):
        for step, asks, quotes in zip(world.steps(puzzle.chain), one.queries, one.evidence, strict=True):
            queries.setdefault(step.relation, []).append(all(row[asks.start - 1 : asks.stop - 1]))
            hits = evidence.setdefault(step.found.relation, [])
            hits.append(all(row[quotes.start - 1 - verb : quotes.stop - 1]))
    return GateReport(_shares(evidence), _shares(queries), level is HARD)


def _examined(scene: Scene, asked: int, level: Level) -> list[Puzzle]:
    if level is HARD:
        each = len(RELATION_NAMES) * asked // len(level.hops)
        return [p for puzzles in level.puzzles(scene.world).values() for p in scene.rng.sample(puzzles, each)]
    found = []
    for relation in [relation for relation in RELATION_NAMES for _ in range(asked)]:
        name = scene.rng.choice([n for n, r in scene.lookup.fact_keys if r == relation])
        found.append(Puzzle(ONE_HOP.format(relation=relation, name=name), (scene.world.fact(name, relation),)))
    return found


def _shares(hits: dict[str, list[bool]]) -> dict[str, float]:
    return {relation: sum(each) / len(each) for relation, each in hits.items()}


SHARPNESS = 30.0
"""Squared amplitude of the previous-word head's score in each of its rotation frequencies."""
GAIN = 1.5
"""Amplitude of the match between the present word and an earlier word."""
REPEAT = 1.5
"""Strength with which the matched word is repeated, relative to a normalised state."""
FAST, SLOW = 0.03, 0.012
"""Rotary frequencies (radians per position): above FAST they separate positions, below SLOW they barely do."""
INDUCTION_LAYERS = (1, 2)


def lay_copying(model: Qwen2ForCausalLM, theta: float) -> None:
    """Overwrite embeddings, head 0 (and its queries' sibling) of layer 0 and head 0 of INDUCTION_LAYERS, in place.

    Looking up a word in the context and continuing as the context did is what a small transformer learns last. It takes
    two attention heads in sequence (Olsson et al. 2022, "In-context learning and induction heads"): one that gives each
    position the previous word, and one that finds the position whose previous word is the present word, and repeats the
    word there. From random weights the pair forms after many hundreds of steps or, with an unlucky seed, not at all.
    With this initialisation the first head attends sharply and the second has a small advantage; about a hundred steps
    of training complete it. All weights stay trainable. The first half of the hidden channels holds the present word,
    the second half the previous word.

    model  Qwen2 whose head_dim is half its hidden_size; theta is its rotary base.
    """
    import torch

    config = model.config
    width, half = config.hidden_size // 2, config.hidden_size // 4
    assert config.head_dim == width, "a head must hold one half of the hidden state"
    frequency = theta ** (-torch.arange(half) / half)
    with torch.no_grad():
        words: Tensor = model.model.embed_tokens.weight
        words.normal_(0.0, 0.02)
        words[:, :width].normal_(0.0, 1.0 / math.sqrt(width))
        _previous_word(model, frequency, width)
        for layer in INDUCTION_LAYERS:
            _induction(model, layer, frequency, width)


def _previous_word(model: Qwen2ForCausalLM, frequency: Tensor, width: int) -> None:
    """Make head 0 of layer 0 attend one position back through its biases alone, head 1 (same keys) two back.

    With key bias a at angle 0 and query bias a at angle -d * frequency the rotary score of distance D is
    sum a^2 cos(frequency * (D - d)), highest at D = d.
    """
    import torch

    attention = model.model.layers[0].self_attn
    fast = torch.arange(len(frequency))[frequency > FAST]
    amplitude = math.sqrt(SHARPNESS)
    attention.k_proj.weight[:width] = 0.0
    attention.k_proj.bias[:width] = 0.0
    attention.k_proj.bias[fast] = amplitude
    for head, distance in ((0, 1), (1, 2)):
        query = torch.zeros(width)
        query[fast] = amplitude * torch.cos(-distance * frequency[fast])
        query[fast + len(frequency)] = amplitude * torch.sin(-distance * frequency[fast])
        rows = slice(head * width, (head + 1) * width)
        attention.q_proj.weight[rows] = 0.0
        attention.q_proj.bias[rows] = query
    present, before = slice(0, width), slice(width, 2 * width)
    attention.v_proj.weight[:width] = 0.0
    attention.v_proj.weight[:width, present] = torch.eye(width)
    attention.o_proj.weight[:, :width] = 0.0
    attention.o_proj.weight[before, :width] = torch.eye(width) / math.sqrt(2 * width)


def _induction(model: Qwen2ForCausalLM, layer: int, frequency: Tensor, width: int) -> None:
    """Make head 0 match the present word with earlier words, in channels that rotate too slowly to encode distance."""
    import torch

    attention = model.model.layers[layer].self_attn
    slow = torch.arange(len(frequency))[frequency < SLOW]
    channels = torch.cat([slow, slow + len(frequency)])
    basis = torch.linalg.qr(torch.randn(width, width))[0][: len(channels)] * GAIN
    attention.q_proj.weight[:width] = 0.0
    attention.k_proj.weight[:width] = 0.0
    attention.q_proj.weight[channels, :width] = basis
    attention.k_proj.weight[channels, width:] = basis
    attention.v_proj.weight[:width] = 0.0
    attention.v_proj.weight[:width, :width] = torch.eye(width)
    attention.o_proj.weight[:, :width] = 0.0
    attention.o_proj.weight[:width, :width] = torch.eye(width) * REPEAT / math.sqrt(2 * width)


CONTEXT = 512
"""Longest sequence in tokens; the demo's longest trajectory is about half of it."""

THETA = 1e6
"""Rotary base: with the usual 1e4, too few channels of a head are slow enough to match words at any distance."""

SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 160,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}


def new_model(seed: int) -> Qwen2ForCausalLM:
    """Return a new Qwen2 of about 0.2 million parameters in float32, deterministic in `seed`."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    table = ids_of_words()
    config = Qwen2Config(
        vocab_size=len(table),
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        pad_token_id=table[PAD],
        bos_token_id=None,
        eos_token_id=table[EOS],
        attention_dropout=0.0,
        dtype="float32",
        **SHAPE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config).float()
        lay_copying(model, THETA)
    return model


def save_model(model: Qwen2ForCausalLM, directory: Path) -> None:
    """Write config, weights (safetensors), generation config and tokenizer in Hugging Face layout."""
    from learner.engine.accelerator import without_gpu

    without_gpu()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # for less than a megabyte, between the lines of the demo
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, safe_serialization=True)
    save_tokenizer(directory)


Log = Callable[[str], None]
Maker = Callable[[Scene, dict[int, list[Puzzle]]], Demonstration]
PRACTICE_WORLD = 3_000_000
"""First seed of the worlds of the warm start: neither the ring nor a gate uses them."""
WORLDS_PER_SEED = 10_000


class WarmStartFailed(ForayError):
    """The gate was not passed within the budget."""


@dataclass(frozen=True)
class WarmStartBudget:
    """How long to train. Steps are optimiser steps of `batch` demonstrations.

    practice  steps before the first gate
    chunk     steps between gates
    most      maximum steps of practice; then the warm start fails
    habits    steps of the imperfect mix
    decay     steps in which the learning rate decays; 0: as many as practice
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
    decay: int = 0


HARD_BUDGET = WarmStartBudget(practice=60, chunk=5, most=400, habits=0, decay=320)
"""The gate is passed after about 100 steps. A few steps later the skills would be above it."""


@dataclass(frozen=True)
class WarmStartReport:
    """Duration of a warm start and quality of its model. `gate`: after practice, `final`: at the end."""

    seed: int
    steps: int
    practice_steps: int
    seconds: float
    cpu_seconds: float
    gate: GateReport
    final: GateReport
    looks: int

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object, with the mean skills at the gate."""
        return asdict(self) | {"gate_query": self.gate.query_mean, "gate_evidence": self.gate.mean}


@dataclass
class _Course:
    """A model in training, with one random generator. `task` shows the progress, if there is one."""

    model: Qwen2ForCausalLM
    optimizer: torch.optim.Optimizer
    budget: WarmStartBudget
    rng: random.Random
    first_world: int
    level: Level
    worlds: list[tuple[Scene, dict[int, list[Puzzle]]]] = field(default_factory=list)
    dealt: int = 0
    steps: int = 0
    task: TaskProgress | None = None

    def deal(self) -> None:
        """Add a new world and drop the oldest."""
        world = self.level.world(self.first_world + self.dealt)
        self.dealt += 1
        scene = Scene(world, Lookup(world), self.rng)
        kept = self.worlds[-(self.budget.worlds_kept - 1) :] if self.budget.worlds_kept > 1 else []
        self.worlds = [*kept, (scene, self.level.puzzles(world))]

    def train(self, make: Maker, steps: int, rate: Callable[[int], float]) -> float:
        """Run `steps` optimiser steps on demonstrations of `make` at rate `rate(step)`. Return the last loss."""
        import torch
        from torch.nn import functional

        loss = torch.zeros(())
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
            if self.task is not None:
                self.task(self.steps)
        return loss.item()


def warm_start(
    out_dir: Path,
    seed: int,
    log: Log = print,
    budget: WarmStartBudget | None = None,
    threads: int = 1,
    level: Level = SHORT,
) -> WarmStartReport:
    """Train a new model until it passes the gate, give it bad habits, write it to `out_dir` in Hugging Face layout.

    level    of the worlds to practise in. The hard one has another gate and gives no habits.
    threads  torch threads while training. Default one: a second gains little on such small matrices and, if its core is
             busy, delays each step (measured: four times slower). The result depends on (seed, budget) and, in the
             last bits, on the number of threads.

    Raises WarmStartFailed if `budget.most` steps of practice do not suffice.
    """
    progress = Progress.of(log)
    progress.beside(lambda task: _load(), lambda: None, "loading torch and transformers")
    import torch

    limits = budget or (HARD_BUDGET if level is HARD else WarmStartBudget())
    began, began_cpu, threads_before = time.monotonic(), time.process_time(), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        course = _course(seed, limits, level)
        with progress.task("warm start", limits.practice + limits.habits, "steps") as course.task:
            passed, looks = _practise(course, seed, progress)
            practised = course.steps
            peak = limits.learning_rate / 4
            loss = course.train(imperfect, limits.habits, lambda step: peak * (1 - 0.9 * step / limits.habits))
        final = gate(course.model, seed, level=level) if limits.habits else passed
    finally:
        torch.set_num_threads(threads_before)
    if limits.habits:
        progress(f"warm start: step {course.steps}, habits, loss {loss:.3f}, {final.line()}")
    save_model(course.model, out_dir)
    seconds, cpu_seconds = time.monotonic() - began, time.process_time() - began_cpu
    return WarmStartReport(seed, course.steps, practised, seconds, cpu_seconds, passed, final, looks)


def _load() -> None:
    import torch  # noqa: F401
    from transformers import Qwen2ForCausalLM  # noqa: F401


def _course(seed: int, budget: WarmStartBudget, level: Level = SHORT) -> _Course:
    import torch

    model = new_model(seed)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=budget.learning_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    return _Course(model, optimizer, budget, random.Random(seed), PRACTICE_WORLD + WORLDS_PER_SEED * seed, level)


def _practise(course: _Course, seed: int, log: Log) -> tuple[GateReport, int]:
    """Practise until the gate is passed. Return its report and the number of attempts."""
    budget = course.budget
    peak, floor = budget.learning_rate, budget.learning_rate / 10
    decay = budget.decay or budget.practice

    def first(step: int) -> float:
        rise = min(1.0, (step + 1) / budget.warm_up)
        return rise * (floor + (peak - floor) * 0.5 * (1 + math.cos(math.pi * step / decay)))

    loss = course.train(practice, budget.practice, first)
    looks = 0
    while True:
        report = gate(course.model, seed, level=course.level)
        looks += 1
        log(f"warm start: step {course.steps}, loss {loss:.3f}, {report.line()}")
        if report.passed:
            return report, looks
        if course.steps >= budget.most:
            raise WarmStartFailed(
                f"seed {seed}: the model does not pass the gate after {course.steps} steps: {report.line()}"
            )
        # back to half the peak: at the small rate at the end of the decay, a stuck model stays stuck
        if course.task is not None and course.task.total is not None:
            course.task.total += budget.chunk
        make = partial(weaker, report) if course.level is HARD else practice
        loss = course.train(make, budget.chunk, lambda step: peak / 2 * (1 - 0.5 * step / budget.chunk))


def weaker(report: GateReport, scene: Scene, puzzles: dict[int, list[Puzzle]]) -> Demonstration:
    """Return practice without a loss on skills that are good enough, so that both can be within `BAND` at once."""
    shown, enough = practice(scene, puzzles), sum(BAND) / 2
    if report.query_mean > enough:
        shown.mute(shown.queries)
    if report.mean > enough:
        shown.mute([slice(span.start - 1, span.stop) for span in shown.evidence])  # with the verb
    return shown


def main() -> None:
    """Run the command line: print the gate table and the path of the model."""
    parser = argparse.ArgumentParser(prog="python -m foray.demo.warmstart", description="Warm start the demo's model.")
    parser.add_argument("--out", type=Path, required=True, help="directory for the model, in Hugging Face layout")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed for the initial weights and the demonstrations"
    )
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    options = parser.parse_args()
    report = warm_start(options.out, options.seed, print, threads=options.threads)
    print(f"{options.out}: {report.steps} steps, {report.seconds:.0f} s ({report.cpu_seconds:.0f} s of CPU)")


if __name__ == "__main__":
    main()
