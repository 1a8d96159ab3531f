"""Train a model on demonstrations (supervised fine-tuning), for example as the start of a run.

    foray data demonstrate train.jsonl --corpus corpus.jsonl --out demos.jsonl
    foray sft demos.jsonl --model models/smollm2 --out models/warm --config run.yaml sft.lr=2e-4

The same command continues after a stop; a kill loses at most `sft.checkpoint_s` seconds. OUT appears when it is
complete: weights (safetensors), configuration, tokenizer, and sft.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import UserError
from protocol.runtime.lifecycle import deferred_shutdown
from protocol.runtime.progress import Progress

if TYPE_CHECKING:
    from collections import Counter

    from learner.sft.record import SftPlan, SftProgress


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray sft`."""
    parser.add_argument("words", nargs="+", metavar="DEMONSTRATIONS | key=value",
                        help="files of demonstrations (docs/sft.md), and settings, e.g. sft.lr=1e-4")  # fmt: skip
    parser.add_argument("--model", type=Path, help="model directory to start from (default: run.model)")
    parser.add_argument("--out", type=Path, required=True, help="directory to create")
    parser.add_argument("--config", type=Path, help="YAML file: the section sft, and template and limits of a run")
    parser.add_argument("--json", action="store_true", help="print a JSON summary at the end")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the model is written, 1 after a SIGTERM, 130 after Ctrl-C: the same command then continues."""
    from deploy.config import load_config
    from foray.data.encoding import DemonstrationEncoder, encode_files
    from learner.sft.record import SftPlan

    paths = [Path(word) for word in args.words if "=" not in word]
    if not paths:
        raise UserError("no file of demonstrations is given", todo="foray sft demos.jsonl --model DIR --out DIR")
    config = load_config(args.config, [word for word in args.words if "=" in word])
    model = args.model or config.run.model
    progress = Progress.on(sys.stderr)
    encoder = DemonstrationEncoder(model, config.rollout.episode, max_tokens=config.sft.max_tokens, day=config.run.date)
    with progress.task("sft: encoding", unit="conversations") as task:
        examples, left_out = encode_files(paths, encoder, task)
    plan = SftPlan.of(
        examples, model=model, out=args.out, settings=config.sft, trainer=config.learner, seed=config.run.seed
    )
    progress(_overview(plan, left_out))
    reached = plan.finished()
    if reached is not None:
        progress(f"sft: {args.out} is already finished")
        return _tell(args, reached, left_out)
    with deferred_shutdown() as stop:
        stop.deferred = True
        reached = _train(plan, progress, stop.is_set)
        if reached.step < reached.steps:
            progress(f"sft: stopped after step {reached.step} of {reached.steps}; a checkpoint is in {plan.folder}")
            progress(f"continue with: {args.again}")
            return 130 if stop.number == signal.SIGINT else 1
    return _tell(args, reached, left_out)


def _train(plan: SftPlan, progress: Progress, should_stop: Callable[[], bool]) -> SftProgress:
    """Train and show it."""
    progress(f"sft: loading {plan.model}")
    # Threads of torch that spin while they wait take the cores from each other; read when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from learner.sft.training import train

    with progress.task("sft", plan.steps, "updates") as task:

        def report(now: SftProgress) -> None:
            task.note = f"loss {now.last_loss:.3f}, {now.tokens / now.seconds:.0f} tokens/s" if now.seconds else ""
            task(now.step)

        return train(plan, report, should_stop)


def _overview(plan: SftPlan, left_out: Counter[str]) -> str:
    tokens = sum(len(example.ids) for example in plan.examples)
    trained = sum(len(example.trained) for example in plan.examples)
    parts = [
        f"sft: {len(plan.examples)} conversations, {tokens:,} tokens, {trained / tokens:.0%} of them trained, "
        f"{plan.steps} updates"
    ]
    if plan.evaluated:
        parts.append(f"{len(plan.evaluated)} held out")
    parts += [f"left out: {count} {reason}" for reason, count in left_out.items()]
    return "; ".join(parts)


def _tell(args: argparse.Namespace, reached: SftProgress, left_out: Counter[str]) -> int:
    if args.json:
        print(json.dumps(reached.to_json() | {"out": str(args.out), "left_out": dict(left_out)}, indent=1))
        return 0
    print(
        f"wrote {args.out}: {reached.steps} updates, {reached.tokens:,} tokens ({reached.trained_tokens:,} "
        f"trained), {reached.seconds:.0f} s, loss {reached.first_loss:.3f} to {reached.last_loss:.3f}"
    )
    for step, loss in reached.evals:
        print(f"  held out after step {step:.0f}: loss {loss:.3f}")
    return 0
