"""Ask a running rollout server questions and score the answers, at the engines' present weights."""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from deploy.rundir import read_record, require
from protocol.errors import UserError


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foray eval`."""
    parser.add_argument("where", help="run directory, or the URL of a rollout server")
    parser.add_argument("--questions", type=Path, required=True, help="JSON lines with `question` and `answers`")
    parser.add_argument("--limit", type=int, help="only the first so many questions")
    parser.add_argument("--n", type=int, default=1, help="episodes a question (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument("--no-search", action="store_true", help="every search comes back empty: what does it know?")
    parser.add_argument("--block", type=int, default=64, help="questions a request (default: 64)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="longest wait for a block in seconds (default: 600)"
    )
    parser.add_argument("--out", type=Path, help="write every episode here, one JSON object a line")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """0 when every episode was scored, 1 when some failed for reasons of infrastructure."""
    from deploy.evaluate import evaluate
    from deploy.pulse import Pulse, beside
    from learner.questions import load_questions

    if not args.questions.is_file():
        raise UserError(
            f"cannot read the questions {args.questions}",
            why="there is no such file",
            todo="give --questions a file of JSON lines with `question` and `answers`",
        )
    questions = load_questions(args.questions).questions[: args.limit]
    url = _url(args.where)

    pulse = Pulse(lambda line: print(line, file=sys.stderr, flush=True))
    done, begun = 0, time.monotonic()

    def progress(number: int) -> None:
        nonlocal done
        done = number
        pulse.say(f"{done} of {len(questions)} questions")

    def line() -> str:
        return f"{done} of {len(questions)} questions, {time.monotonic() - begun:.0f} s"

    work = partial(
        evaluate,
        url,
        questions,
        n=args.n,
        temperature=args.temperature,
        search=not args.no_search,
        block=max(1, args.block),
        timeout_s=args.timeout,
        progress=progress,
    )
    score = beside(work, lambda: pulse.beat(line))
    if args.out is not None:
        args.out.write_text("".join(json.dumps(e, ensure_ascii=False) + "\n" for e in score.episodes))
    summary: dict[str, Any] = {
        "url": url,
        "questions": len(questions),
        "episodes": len(score.episodes),
        "failed": score.failed,
        "temperature": args.temperature,
        "search": not args.no_search,
        **score.means,
        "searches": score.mean("searches"),
        "turns": score.mean("turns"),
    }
    if args.json:
        print(json.dumps(summary))
    else:
        for name, value in summary.items():
            print(f"{name:<12} {f'{value:.4f}' if isinstance(value, float) else value}")
    return 1 if score.failed else 0


def _url(where: str) -> str:
    if "://" in where:
        return where
    directory = require(Path(where))
    rollouts = read_record(directory).get("rollouts") or []
    if not rollouts:
        raise UserError(f"{directory} names no rollout server", todo="give the server's URL instead (see its log)")
    return str(rollouts[0])
