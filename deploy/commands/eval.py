"""Evaluate the policy of a running rollout server on questions, all at one policy version."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deploy.launcher.run_dir import read_record, require
from protocol.errors import ForayError, UserError
from protocol.runtime.files import atomic_write

if TYPE_CHECKING:
    from deploy.monitor.evaluate import Episode, EvalScore
    from protocol.messages import Question

POLICY = ("run", "lineage_id", "model")
"""Fields of an episode that identify the policy, besides its version: a mean must not mix policies."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray eval`."""
    parser.add_argument("where", help="run directory, or the URL of a rollout server")
    parser.add_argument("--questions", type=Path, required=True, help="questions, in any format of docs/data.md")
    parser.add_argument("--limit", type=int, help="use only the first LIMIT questions")
    parser.add_argument("--n", type=int, default=1, help="episodes per question (default: 1)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 is greedy (default: 1)")
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="nucleus sampling: total probability of the tokens to sample from"
    )
    parser.add_argument(
        "--top-k", type=int, default=-1, help="sample from this many of the most likely tokens (-1: all)"
    )
    parser.add_argument("--no-search", action="store_true", help="disable search: every search returns nothing")
    parser.add_argument("--concurrency", type=int, default=64, help="episodes in flight at once (default: 64)")
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="timeout in seconds for the next episode (default: 600)"
    )
    parser.add_argument(
        "--out", type=Path, help="file for the episodes, one JSON object per line, written as each ends"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep the episodes in --out and evaluate only the remaining questions"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "All episodes use one policy version, which the summary names. Engines keep that version meanwhile: in a run "
        "that trains, new weights wait until the evaluation ends (at most rollout.pin_max_s), unless engines of role "
        "`eval` serve it. Exit code 1: episodes failed, or a --resume or a lost connection mixed several versions."
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if every episode was scored at one version, 1 if some failed or versions are mixed."""
    from deploy.heartbeat import Pulse, beside
    from deploy.monitor.evaluate import evaluate
    from learner.data.questions import load_questions

    questions = load_questions(args.questions).questions[: args.limit]
    how = {"temperature": args.temperature, "top_p": args.top_p, "top_k": args.top_k, "search": not args.no_search}
    done = _earlier(args.out, how, questions) if args.resume else _fresh(args.out)
    url = _url(args.where)
    pulse = Pulse(lambda line: print(line, file=sys.stderr, flush=True))
    begun = time.monotonic()
    texts = {question.id: {"question": question.text, "answers": list(question.answers)} for question in questions}
    ended, first = 0, done[0] if done else None
    out: TextIO | None = None
    if args.out is not None:
        _write(args.out, done)
        out = args.out.open("a", encoding="utf-8")

    def each(episode: Episode) -> None:
        nonlocal ended, first
        first = first or episode
        _refuse_another_policy(episode, first)
        ended += 1
        episode |= how | texts[episode["question_id"]]  # in place: the score refers to the same dict
        if out is not None:
            print(json.dumps(episode, ensure_ascii=False), file=out, flush=True)

    def line() -> str:
        return f"{ended} episodes of {len(questions)} questions, {time.monotonic() - begun:.0f} s"

    work = partial(
        evaluate,
        url,
        questions,
        n=args.n,
        concurrency=max(1, args.concurrency),
        timeout_s=args.timeout,
        done=done,
        each=each,
        **how,
    )
    try:
        score = beside(work, lambda: pulse.beat(line))
    except ForayError:
        if out is not None and ended:
            print(f"{ended} more episodes are in {args.out}: continue with --resume", file=sys.stderr)
        raise
    finally:
        if out is not None:
            out.close()
    if args.out is not None:  # in the order of the questions, each episode once; then those beyond --limit
        _write(args.out, score.episodes + [e for e in done if e["question_id"] not in texts])
    return _report(score, {"url": url, "questions": len(questions)}, how, as_json=args.json)


def _write(path: Path, episodes: list[Episode]) -> None:
    lines = (json.dumps(episode, ensure_ascii=False) + "\n" for episode in episodes)
    atomic_write(path, "".join(lines), durable=False)


def _report(score: EvalScore, what: dict[str, Any], how: dict[str, Any], *, as_json: bool) -> int:
    versions = score.versions
    mixed = len(versions) > 1 or any("+" in version for version in versions)
    summary: dict[str, Any] = {
        **what,
        "episodes": len(score.episodes),
        "failed": score.failed,
        "too_long": score.too_long,
        "version": None if mixed else next(iter(versions), None),
        "versions": versions,
        **how,
        **score.means,
        "searches": score.mean("searches"),
        "turns": score.mean("turns"),
    }
    if as_json:
        print(json.dumps(summary))
    else:
        summary["versions"] = ", ".join(f"{version} ({count} episodes)" for version, count in versions.items())
        for name, value in summary.items():
            if name != ("version" if mixed else "versions"):
                print(f"{name:<12} {f'{value:.4f}' if isinstance(value, float) else value}")
    if mixed:
        message = "error: the score mixes several policy versions and is valid for none of them"
        print(f"{message}: evaluate again without --resume", file=sys.stderr)
    if score.too_long:
        message = f"warning: {score.too_long} episodes were skipped because their prompts are too long"
        print(f"{message}: raise rollout.episode.max_context of the run to score them", file=sys.stderr)
    return 1 if score.failed or mixed else 0


def _fresh(path: Path | None) -> list[Episode]:
    """Return no episodes. Raises UserError if `path` already holds episodes."""
    if path is not None and path.is_file() and path.stat().st_size:
        raise UserError(
            f"{path} already exists",
            why="it would be overwritten, and its episodes lost",
            todo="continue it with --resume, give another --out, or delete it",
        )
    return []


def _refuse_another_policy(episode: Episode, first: Episode) -> None:
    """Raise UserError if `episode` is of another run or model than `first`."""
    for name in POLICY:
        if episode.get(name) != first.get(name):
            raise UserError(
                f"the earlier episodes are of another policy: {name} was {first.get(name)}, now {episode.get(name)}",
                why="versions are numbers within one run, so a mean over both would be meaningless",
                todo="evaluate on the same server as before, or give another --out",
            )


def _earlier(path: Path | None, how: dict[str, Any], questions: Sequence[Question]) -> list[Episode]:
    """Return the episodes in an --out file, without an incomplete last line.

    Raises UserError if they have other options, another policy than the first, or changed questions.
    """
    if path is None:
        raise UserError("--resume needs --out", todo="give --out the file that the earlier evaluation wrote")
    asked = {question.id: (question.text, list(question.answers)) for question in questions}
    episodes: list[Episode] = []
    try:
        lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except FileNotFoundError:
        return []
    for number, line in enumerate(lines, 1):
        try:
            episode = json.loads(line)
            other = {name: episode[name] for name in how if episode[name] != how[name]}
            of, _ = episode["question_id"], episode["index"]
            changed = of in asked and asked[of] != (episode["question"], episode["answers"])
        except (ValueError, KeyError, TypeError):
            if number == len(lines):
                break
            raise UserError(f"line {number} of {path} is not an episode", todo="give another --out") from None
        if other:
            raise UserError(
                f"{path} was written with {', '.join(f'{name} {value}' for name, value in other.items())}",
                todo="give the same options, or another --out",
            )
        if changed:
            raise UserError(
                f"{path} has another text or other answers for the question {of!r}",
                todo="give the same --questions, or another --out",
            )
        episodes.append(episode)
        _refuse_another_policy(episode, episodes[0])
    return episodes


def _url(where: str) -> str:
    if "://" in where:
        return where
    directory = require(Path(where))
    rollouts = read_record(directory).get("rollouts") or []
    if not rollouts:
        raise UserError(
            f"no rollout server is recorded in {directory}", todo="give the server's URL, which is in its log"
        )
    return str(rollouts[0])
