"""The phases of the demo: prepare, start the ring, evaluate, train, evaluate again.

    two worlds, their passages, a warm-started model, a configuration
    start redis, retriever, engine, rollout server -> evaluate the held-out questions (sampled, greedy)
    start the learner -> its steps -> done -> wait until the engine has loaded the last version
    -> evaluate again (sampled, greedy, and with search disabled) -> stop

Evaluation uses the running rollout server and engine, with the code that also generates training data.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.config import RunConfig, from_tree
from deploy.launch.launcher import Launcher
from deploy.run.history import read_steps
from deploy.run.run_dir import is_held, read_record, unique_id
from deploy.run.snapshot import RunSnapshot, read_ledger_totals, take_snapshot
from foray.demo.world import HARD, SHORT, Hops, Level, Lookup, World, write_jsonl
from protocol.errors import ForayError, UserError
from protocol.messages import NodeState, Question
from protocol.runtime.config import override, parse_yaml, read_tree
from protocol.runtime.episodes import EvalScore, evaluate
from protocol.runtime.progress import TaskProgress
from protocol.runtime.timing import PATIENCE

CONFIG = Path(__file__).with_name("demo.yaml")
HARD_OVERRIDES = Path(__file__).with_name("hard.yaml")
"""Settings of the hard demo that differ, as a list of overrides."""
CONFIG_COPY = "demo.yaml"
MARKER = ".foray-demo"
"""Only a directory that contains this file may be removed."""
HELD_OUT_SEED = 1_000_000
"""Worlds with this seed and above are never trained on."""
HELD_OUT_PER_HOPS = 128
TOPK = 2
HOP_NAMES = {1: "one-hop", 2: "two-hop", 3: "three-hop"}

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoOptions:
    """Options of `foray demo`."""

    directory: Path
    seed: int
    shuffled_reward: bool = False
    model: Path | None = None
    overrides: tuple[str, ...] = ()
    fresh: bool = False
    """Replace an existing demo in the directory."""
    hard: bool = False

    @property
    def level(self) -> Level:
        """Return what the demo asks."""
        return HARD if self.hard else SHORT


@dataclass(frozen=True)
class PreparedDemo:
    """The input of `run_demo`. `seconds`: duration of each phase."""

    options: DemoOptions
    config: RunConfig
    config_path: Path
    held_out: list[dict[str, Any]]
    warm_start: dict[str, Any]
    seconds: dict[str, float]


def prepare(options: DemoOptions, say: Say) -> PreparedDemo:
    """Create and fill the run directory.

    Two worlds share the index: the training world and the held-out world. They have no names in common. Raises
    UserError if the directory holds something else, or a trained demo that may not be replaced.
    """
    directory = options.directory
    _clear(directory, fresh=options.fresh)
    directory.mkdir(parents=True)
    (directory / MARKER).touch()
    tree = demo_tree(options)
    (directory / CONFIG_COPY).write_text(yaml.safe_dump(dict(tree), sort_keys=False))
    config = from_tree(tree)
    say("[1/5] generating two worlds of facts")
    began = time.monotonic()
    held_out = write_worlds(options.seed, directory / "world", options.level)
    worlds_s = time.monotonic() - began
    say(f"run {config.run.id}: two worlds in {directory / 'world'}: one for training, one for evaluation")
    say("[2/5] warm start: supervised training on format and reading")
    began = time.monotonic()
    report = _model(options, config, say)
    seconds = {"worlds": worlds_s, "warm_start": time.monotonic() - began}
    return PreparedDemo(options, config, directory / CONFIG_COPY, held_out, report, seconds)


def demo_tree(options: DemoOptions) -> dict[str, Any]:
    """Return the demo's configuration with this run's id, paths and seed, and the overrides."""
    directory = options.directory.absolute()
    chosen = [
        f"run.id={unique_id('demo')}",
        override("run.dir", directory),
        override("run.model", directory / "model"),
        f"run.seed={options.seed}",
        override("retriever.corpus", directory / "world" / "corpus.jsonl"),
        override("learner.questions", directory / "world" / "questions.jsonl"),
        *(["learner.batch.shuffle_rewards=true"] if options.shuffled_reward else []),
    ]
    hard = parse_yaml(HARD_OVERRIDES.read_text()) if options.hard else []
    return read_tree(CONFIG, [*hard, *chosen, *options.overrides])


def write_worlds(seed: int, directory: Path, level: Level = SHORT) -> list[dict[str, Any]]:
    """Write corpus, training questions and held-out questions. Return the held-out questions, one-hop first.

    Every question of the hard demo needs all its searches, with the number of passages of `demo.yaml` (TOPK).
    """
    import random

    train = level.world(seed, level.larger)
    held_out = level.world(HELD_OUT_SEED + seed, avoid=train.names)
    lookup = Lookup(train, held_out)

    def records(world: World, hops: Hops) -> list[dict[str, Any]]:
        every = zip(world.questions(hops), world.puzzles(hops), strict=True)
        if level is SHORT:
            return [record for record, _ in every]
        chains = ((record, world.steps(puzzle.chain)) for record, puzzle in every)
        return [r for r, steps in chains if len(steps) <= level.searches and lookup.needs_all(steps, TOPK)]

    rng = random.Random(f"foray demo questions {seed}")
    questions = records(train, 1)
    wanted = len(questions)
    for hops in level.hops[1:]:
        found = records(train, hops)
        questions += rng.sample(found, min(wanted, len(found)))
    rng.shuffle(questions)
    asked = [q for hops in level.hops for q in rng.sample(records(held_out, hops), HELD_OUT_PER_HOPS)]
    directory.mkdir(parents=True, exist_ok=True)
    write_jsonl(directory / "corpus.jsonl", train.passages() + held_out.passages())
    write_jsonl(directory / "questions.jsonl", questions)
    write_jsonl(directory / "held_out.jsonl", asked)
    return asked


def _model(options: DemoOptions, config: RunConfig, say: Say) -> dict[str, Any]:
    """Write the warm-started model to `run.model`, new or copied. Return its part of the summary."""
    if options.model is not None:
        if not (options.model / "model.safetensors").exists():
            raise UserError(f"{options.model} has no model.safetensors", todo="give the model folder of a demo")
        shutil.copytree(options.model, config.run.model)
        say(f"model: a copy of {options.model}")
        return {"copied_from": str(options.model)}
    from foray.demo.warmstart import warm_start

    report = warm_start(config.run.model, options.seed, say, level=options.level)
    return report.to_json()


def _clear(directory: Path, *, fresh: bool) -> None:
    if not directory.exists():
        return
    if not (directory / MARKER).exists():
        raise UserError(f"{directory} exists and is not a demo", todo="choose another --dir")
    if is_held(directory):
        raise UserError(
            f"a demo is running in {directory}", todo=f"stop it with `foray down {directory}`, or choose another --dir"
        )
    metrics = directory / "metrics.jsonl"
    if metrics.exists() and not fresh:
        steps = len(read_steps(metrics))
        finished = (directory / "summary.json").exists() or read_record(directory).get("state") == "done"
        go_on = "" if finished else f"resume it with `foray up {directory / CONFIG_COPY}`; or "
        raise UserError(
            f"{directory} holds a demo that {'has finished' if finished else 'was stopped'} ({steps} steps)",
            todo=f"{go_on}replace it with --fresh, or choose another --dir or --seed",
        )
    shutil.rmtree(directory)


LAST_VERSION_S = 60.0
GREEDY = 0.0


def run_demo(prepared: PreparedDemo, began: float, say: Say) -> dict[str, Any]:
    """Run all phases after the preparation and return the summary. Raises ProcessFailed or RunStopped."""
    seconds = dict(prepared.seconds)
    questions = [Question(id=q["id"], text=q["question"], answers=tuple(q["answers"])) for q in prepared.held_out]
    hops = [int(q["hops"]) for q in prepared.held_out]
    sampled = prepared.config.run.temperature
    with Launcher(prepared.config, say=say, again=f"foray up {prepared.config_path}") as launcher:
        mark = time.monotonic()
        say(f"dashboard: {shlex.join(['foray', 'dashboard', str(prepared.config.run.dir)])}")
        say("[3/5] starting the processes, then evaluating before training")
        launcher.start("redis", "retriever", "engine", "rollout")
        seconds["start"] = time.monotonic() - mark
        mark = time.monotonic()
        say(f"evaluating {len(questions)} questions about a world that is never trained on")
        url, both = launcher.rollout_urls[0], 2 * len(questions)

        def asked(task: TaskProgress) -> list[EvalScore]:
            return ask(url, questions, [sampled, GREEDY], task)

        before = launcher.during(asked, "evaluating, sampled and greedy", both, "episodes")
        say(describe("before", before, hops))
        seconds["ask_before"] = time.monotonic() - mark
        mark = time.monotonic()
        say(f"[4/5] training, {prepared.config.run.steps} steps")
        launcher.start("learner")
        launcher.wait()
        seconds["training"] = time.monotonic() - mark
        mark = time.monotonic()
        say("[5/5] evaluating the same questions again, and once with search disabled")
        waiting = "waiting for all engines to load the last weights"
        snapshot = launcher.during(lambda task: await_last_version(launcher), waiting)
        after = launcher.during(asked, "evaluating, sampled and greedy", both, "episodes")
        blind = launcher.during(
            lambda task: ask(url, questions, [sampled], task, search=False),
            *("evaluating without search", len(questions), "episodes"),
        )
        say(describe("after", after, hops))
        seconds["ask_after"] = time.monotonic() - mark
    summary = scores(before, after, blind, hops) | accounting(prepared.config.run.dir, snapshot)
    summary["examples"] = example(prepared.held_out, before[0], after[0])
    summary["seconds"] = round(time.monotonic() - began, 1)
    summary["seconds_by_phase"] = {name: round(value, 1) for name, value in seconds.items()}
    summary["warm_start"] = prepared.warm_start
    summary |= {k: round(v, 3) for k, v in prepared.warm_start.items() if k.startswith("gate_")}
    summary["temperature"] = sampled
    summary["run"] = prepared.config.run.id
    summary["seed"] = prepared.options.seed
    summary["control"] = "shuffled-reward" if prepared.options.shuffled_reward else "none"
    return summary


def ask(
    url: str, questions: Sequence[Question], temperatures: Sequence[float], task: TaskProgress, *, search: bool = True
) -> list[EvalScore]:
    """Return one score per temperature, evaluated concurrently so that all use one policy version."""
    ended = itertools.count(1)

    def each(episode: object) -> None:
        task.update(next(ended))

    def one(temperature: float) -> EvalScore:
        return evaluate(url, questions, temperature=temperature, search=search, concurrency=len(questions), each=each)

    with ThreadPoolExecutor(len(temperatures)) as pool:
        return list(pool.map(one, temperatures))


def await_last_version(launcher: Launcher) -> RunSnapshot:
    """Return the snapshot in which every ready engine holds the target version. Raises ForayError on a timeout."""
    began = time.monotonic()
    while True:
        snapshot = take_snapshot(launcher.redis_url, launcher.config.run.id, launcher.directory)
        ready = [e for e in snapshot.engines if e.state is NodeState.READY]
        if snapshot.target is not None and ready and all(e.version == snapshot.target.version for e in ready):
            return snapshot
        limit_s = max([LAST_VERSION_S, *(PATIENCE * max(e.pause_s, e.pace_s) for e in snapshot.engines)])
        if time.monotonic() > began + limit_s:
            states = (
                ", ".join(f"{e.id} {e.state} {e.version.label} {e.detail}" for e in snapshot.engines) or "no engine"
            )
            raise ForayError(f"the engines have not loaded the last version after {limit_s:.0f} s: {states}")
        time.sleep(0.2)


def exact_match(score: EvalScore, hops: Sequence[int], wanted: int) -> float:
    """Return the mean exact match of questions with `wanted` hops. A failed episode counts as wrong."""
    values = [float(e["rewards"].get("em", 0.0)) for e, h in zip(score.episodes, hops, strict=True) if h == wanted]
    return sum(values) / len(values)


def overall(score: EvalScore, hops: Sequence[int]) -> float:
    """Return the mean of the exact matches of each number of hops."""
    each = [exact_match(score, hops, wanted) for wanted in sorted(set(hops))]
    return sum(each) / len(each)


def describe(when: str, asked: Sequence[EvalScore], hops: Sequence[int]) -> str:
    """Return a line about the scores."""
    sampled, greedy = asked
    each = ", ".join(f"{exact_match(sampled, hops, n):.3f} {HOP_NAMES[n]}" for n in sorted(set(hops)))
    return (
        f"{when}: exact match {overall(sampled, hops):.3f} sampled ({each}), {overall(greedy, hops):.3f} greedy, "
        f"{sampled.mean('searches'):.2f} searches per question"
    )


def scores(
    before: Sequence[EvalScore], after: Sequence[EvalScore], blind: Sequence[EvalScore], hops: Sequence[int]
) -> dict[str, Any]:
    """Return the evaluation part of the summary."""
    found: dict[str, Any] = {"questions": len(hops)}
    for when, (sampled, greedy) in (("before", before), ("after", after)):
        found[f"em_{when}"] = round(overall(sampled, hops), 4)
        found[f"em_greedy_{when}"] = round(overall(greedy, hops), 4)
        for wanted in sorted(set(hops)):
            found[f"em_{wanted}hop_{when}"] = round(exact_match(sampled, hops, wanted), 4)
            found[f"em_greedy_{wanted}hop_{when}"] = round(exact_match(greedy, hops, wanted), 4)
        found[f"searches_{when}"] = round(sampled.mean("searches"), 3)
        found[f"failed_{when}"] = sampled.failed + greedy.failed
    found["em_after_without_search"] = round(overall(blind[0], hops), 4)
    return found


def accounting(directory: Path, snapshot: RunSnapshot) -> dict[str, Any]:
    """Return the run part of the summary: steps, delivery, lag, tokens."""
    steps = list(read_steps(directory / "metrics.jsonl").values())
    ledger = read_ledger_totals(directory)
    rollouts, learner = snapshot.of("rollout"), snapshot.learner
    trained = sum(step["tokens_trained"] for step in steps)
    curve = [round(step["reward/em"], 3) for step in steps if "reward/em" in step]
    return {
        "steps": steps[-1]["step"],
        "half_gain": half_gain(curve),
        "groups_trained": ledger.counts["trained"] if ledger else 0,
        "groups_published": int(sum(r.values.get("groups_published", 0) for r in rollouts)),
        "duplicates": int(sum(r.values.get("duplicates", 0) for r in rollouts))
        + int(learner.values.get("duplicates", 0) if learner else 0),
        "settled": ledger.counts if ledger else {},
        "lag_mean": round(sum(s["lag_mean"] * s["tokens_trained"] for s in steps) / max(trained, 1), 3),
        "lag_max": max(s["lag_max"] for s in steps),
        "tokens_generated": int(sum(r.values.get("tokens_generated", 0) for r in rollouts)),
        "tokens_trained": trained,
        "weight_updates": sum(e.updates for e in snapshot.engines),
        "curve": curve,
    }


def half_gain(curve: Sequence[float], window: int = 10) -> int | None:
    """Return the first step at which the mean of `window` steps has made half of the way from the first to the last.

    None if it did not rise.
    """
    means = [sum(curve[i - window : i]) / window for i in range(window, len(curve) + 1)]
    if not means or means[-1] <= means[0]:
        return None
    return next(i + window for i, mean in enumerate(means) if mean >= (means[0] + means[-1]) / 2)


def example(held_out: Sequence[dict[str, Any]], before: EvalScore, after: EvalScore) -> dict[str, Any]:
    """Return a question that was wrong before and is right now, with both answers; two hops if possible."""
    rows = list(zip(held_out, before.episodes, after.episodes, strict=True))
    cured = [r for r in rows if not r[1]["rewards"].get("em") and r[2]["rewards"].get("em")]
    question, was, now = max(cured or rows, key=lambda row: int(row[0]["hops"]))
    return {
        "question": question["question"],
        "answers": question["answers"],
        "before": was["text"],
        "after": now["text"],
    }
