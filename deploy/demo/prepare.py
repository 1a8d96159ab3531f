"""What must be there before the demo's processes start: two worlds, their passages, a warm-started model, a config.

Two worlds share the index: the one whose questions are trained on, and the one that is only asked about before and
after. No name of the one occurs in the other.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deploy.config import RunConfig, from_tree
from deploy.demo.world import World, write_jsonl
from deploy.rundir import is_held, read_record, unique_id
from protocol.errors import UserError
from protocol.settings import read_tree

CONFIG = Path(__file__).parent.parent / "configs" / "demo.yaml"
CONFIG_COPY = "demo.yaml"
MARKER = ".foray-demo"
"""Only a directory with this file in it is ever removed."""
HELD_OUT_SEED = 1_000_000
"""Worlds from here on are never trained on."""
HELD_OUT_PER_HOPS = 128

Say = Callable[[str], None]


@dataclass(frozen=True)
class DemoOptions:
    """What the person chose."""

    directory: Path
    seed: int
    shuffled_reward: bool = False
    model: Path | None = None
    overrides: tuple[str, ...] = ()
    fresh: bool = False
    """Replace a demo that was trained in the directory."""


@dataclass(frozen=True)
class Prepared:
    """Everything that `run_demo` needs. `seconds` by phase."""

    options: DemoOptions
    config: RunConfig
    config_path: Path
    held_out: list[dict[str, Any]]
    warm_start: dict[str, Any]
    seconds: dict[str, float]


def prepare(options: DemoOptions, say: Say) -> Prepared:
    """Make the run directory and fill it. Raises UserError when it holds something else, or a demo that was trained and
    may not be replaced."""
    directory = options.directory
    _clear(directory, fresh=options.fresh)
    directory.mkdir(parents=True)
    (directory / MARKER).touch()
    tree = demo_tree(options)
    (directory / CONFIG_COPY).write_text(yaml.safe_dump(dict(tree), sort_keys=False))
    config = from_tree(tree)
    say("[1/5] make two worlds of facts")
    began = time.monotonic()
    held_out = write_worlds(options.seed, directory / "world")
    worlds_s = time.monotonic() - began
    say(f"run {config.run.id}: two worlds in {directory / 'world'}: one to train on, one to be asked about")
    say("[2/5] warm start of the model: format and reading, by supervised training")
    began = time.monotonic()
    report = _model(options, config, say)
    seconds = {"worlds": worlds_s, "warm_start": time.monotonic() - began}
    return Prepared(options, config, directory / CONFIG_COPY, held_out, report, seconds)


def demo_tree(options: DemoOptions) -> dict[str, Any]:
    """The demo's configuration with a run id, this run's paths and seed; overrides last."""
    directory = options.directory.absolute()
    chosen = [
        f"run.id={unique_id('demo')}",
        f"run.dir={directory}",
        f"run.model={directory / 'model'}",
        f"run.seed={options.seed}",
        f"retriever.corpus={directory / 'world' / 'corpus.jsonl'}",
        f"learner.questions={directory / 'world' / 'questions.jsonl'}",
        *(["learner.batch.shuffle_rewards=true"] if options.shuffled_reward else []),
    ]
    return read_tree(CONFIG, [*chosen, *options.overrides])


def write_worlds(seed: int, directory: Path) -> list[dict[str, Any]]:
    """Write corpus, training questions and held-out questions; returns the latter, one-hop first."""
    import random

    train = World(seed)
    held_out = World(HELD_OUT_SEED + seed, avoid=train.names)
    rng = random.Random(f"foray demo questions {seed}")
    one, two = train.questions(1), train.questions(2)
    questions = one + rng.sample(two, min(len(one), len(two)))
    rng.shuffle(questions)
    asked = [q for hops in (1, 2) for q in rng.sample(held_out.questions(hops), HELD_OUT_PER_HOPS)]
    directory.mkdir(parents=True, exist_ok=True)
    write_jsonl(directory / "corpus.jsonl", train.passages() + held_out.passages())
    write_jsonl(directory / "questions.jsonl", questions)
    write_jsonl(directory / "held_out.jsonl", asked)
    return asked


def _model(options: DemoOptions, config: RunConfig, say: Say) -> dict[str, Any]:
    """The warm-started model at `run.model`, new or copied; returns what is to be said of it."""
    if options.model is not None:
        if not (options.model / "model.safetensors").exists():
            raise UserError(f"{options.model} holds no model.safetensors", todo="give the model folder of a demo")
        shutil.copytree(options.model, config.run.model)
        say(f"model: a copy of {options.model}")
        return {"copied_from": str(options.model)}
    from deploy.demo.warmstart import warm_start

    report = warm_start(config.run.model, options.seed, say)
    return report.to_json()


def _clear(directory: Path, *, fresh: bool) -> None:
    if not directory.exists():
        return
    if not (directory / MARKER).exists():
        raise UserError(f"{directory} exists and is not a demo", todo="choose another --dir")
    if is_held(directory):
        raise UserError(f"a demo is running in {directory}", todo=f"foray down {directory}, or another --dir")
    metrics = directory / "metrics.jsonl"
    if metrics.exists() and not fresh:
        steps = len(metrics.read_text().splitlines())
        finished = (directory / "summary.json").exists() or read_record(directory).get("state") == "done"
        go_on = "" if finished else f"go on with `foray up {directory / CONFIG_COPY}`; or "
        raise UserError(
            f"{directory} holds a demo that {'has finished' if finished else 'was stopped'} ({steps} steps)",
            todo=f"{go_on}replace it with --fresh, or take another --dir or --seed",
        )
    shutil.rmtree(directory)
