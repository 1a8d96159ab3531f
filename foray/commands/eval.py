"""Evaluate a policy, and baselines with the same model and retriever, on data sets.

TARGET is a run in progress, a run directory or checkpoint, a model folder or Hugging Face name, the URL of a rollout
server, or an OpenAI-compatible endpoint (ending in /v1). Engine, rollout server and retriever are started if necessary,
with the settings of the run or of --config, and stopped at the end. A directory of results is only reported again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.terminal import at_least
from protocol.errors import UserError
from protocol.runtime.files import atomic_write
from protocol.runtime.progress import Progress
from protocol.settings import SECTIONS

if TYPE_CHECKING:
    from foray.evaluation.report import EvalResult
    from foray.evaluation.runner import EvalJob
    from foray.evaluation.store import ResultStore
    from foray.evaluation.suites import DataSet
    from foray.evaluation.summary import Summary
    from foray.evaluation.targets import Target
    from rollout_server.rewards.judge import JudgeSettings


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray eval`."""
    parser.add_argument("where", metavar="TARGET", help="run, checkpoint, model, URL, or directory of results")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for what is started")
    what = parser.add_argument_group("questions and methods")
    what.add_argument(
        *("--suite", "--questions"),
        dest="suite",
        nargs="+",
        action="extend",
        metavar="SUITE|FILE|NAME=FILE",
        help="search-r1 (7 data sets), research (4), or files of questions",
    )
    what.add_argument("--data", type=Path, default=Path("data"), help="directory of the suites' files (default: data)")
    what.add_argument("--limit", type=at_least(1), help="use only the first LIMIT questions of each data set")
    what.add_argument(
        "--methods",
        nargs="+",
        default=["policy"],
        metavar="METHOD",
        help="policy, direct, cot, rag, iter_retgen, ircot, flare, all, or '{type: flare, threshold: 0.5}'",
    )
    what.add_argument("--no-search", action="store_true", help="disable search: every search returns nothing")
    sampler = parser.add_argument_group("sampling")
    sampler.add_argument("--n", type=int, default=1, help="episodes per question (default: 1)")
    sampler.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    sampler.add_argument("--top-p", type=float, default=1.0, help="sample from tokens of this total probability")
    sampler.add_argument("--top-k", type=int, default=-1, help="sample from this many tokens (-1: all)")
    sampler.add_argument("--concurrency", type=int, default=64, help="episodes in flight at once (default: 64)")
    sampler.add_argument(
        "--timeout", type=float, help="timeout in seconds of an episode (default: its turns have limits)"
    )
    served = parser.add_argument_group("what is started")
    served.add_argument("--config", type=Path, help="configuration (default: that of the run)")
    served.add_argument("--retriever", default="", metavar="URL", help="use this retriever instead of starting one")
    served.add_argument("--model", default="", help="name of the model at an endpoint (default: its only one)")
    served.add_argument("--api", choices=["chat", "completions"], default="chat", help="route of an endpoint")
    result = parser.add_argument_group("results")
    result.add_argument("--out", type=Path, metavar="DIR", help="directory to write (default: evaluations/TARGET-TIME)")
    result.add_argument("--resume", action="store_true", help="continue the results in --out")
    result.add_argument(
        "--against", type=Path, nargs="+", action="extend", default=[], metavar="DIR", help="results to compare with"
    )
    result.add_argument("--judge", default="", metavar="URL", help="also grade answers with this endpoint's model")
    result.add_argument("--judge-model", default="", help="name of the judge's model")
    result.add_argument("--json", action="store_true", help="print one JSON object")
    parser.epilog = (
        "DIR holds episodes.jsonl, protocol.json, result.json, report.md and report.html. Exit code 1: episodes failed "
        "or policy versions are mixed. In a run that trains, engines keep one version meanwhile (at "
        "most rollout.pin_max_s), unless engines of role `eval` serve it."
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 if every episode was scored at one version, 1 if some failed or versions are mixed, 130 after Ctrl-C."""
    _separate_overrides(args)
    from foray.evaluation.store import already_there, has_episodes, is_result, read_recipe, read_rows
    from foray.evaluation.targets import find_target

    if is_result(Path(args.where)):
        directory = Path(args.where)
        return _report(directory, read_recipe(directory), read_rows(directory), args)
    if args.n < 1 or not 0 <= args.temperature <= 100 or not 0 < args.top_p <= 1:
        what = f"--n {args.n} --temperature {args.temperature:g} --top-p {args.top_p:g} cannot be sampled"
        raise UserError(what, todo="give --n from 1, --temperature from 0 to 100, and --top-p above 0 and up to 1")
    if not args.suite:
        raise UserError("no questions are given", todo="give --suite search-r1, or --suite FILE")
    from foray.evaluation.suites import read_suites

    sets = read_suites(args.suite, args.data, args.limit)
    for path in args.against:
        read_recipe(path)  # a wrong path must not show after hours
    target = find_target(args.where)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    directory = args.out or Path("evaluations") / f"{target.name}-{stamp}"
    if has_episodes(directory) and not args.resume:
        raise already_there(directory)
    return _evaluate(target, sets, directory, args)


def _separate_overrides(args: argparse.Namespace) -> None:
    """Move settings from the flags that take several words to the overrides: `--methods rag launch.engines=2`."""
    for name in ("suite", "methods", "against"):
        words = getattr(args, name) or []
        settings = [str(word) for word in words if re.match(rf"({'|'.join(SECTIONS)})\.[\w.]+=", str(word))]
        setattr(args, name, [word for word in words if str(word) not in settings])
        args.overrides = [*args.overrides, *settings]


def _evaluate(target: Target, sets: list[DataSet], directory: Path, args: argparse.Namespace) -> int:
    from deploy.launch.launcher import RunStopped
    from foray.evaluation.methods import POLICY, parse_methods
    from foray.evaluation.runner import AskOptions, EvalJob
    from foray.evaluation.store import open_store, sole_writer
    from foray.evaluation.targets import Needs, ServingOptions, serving

    methods, judge = parse_methods(args.methods), _judge(args)
    sampler = AskOptions(
        *(args.n, args.temperature, args.top_p, args.top_k, not args.no_search),
        concurrency=max(1, args.concurrency),
        timeout_s=args.timeout,
    )
    own = [settings for settings in methods if settings.type != POLICY or target.kind == "endpoint"]
    searches = sampler.search and any(settings.searches for settings in methods)
    needs = Needs(policy=len(own) < len(methods), methods=bool(own), search=searches)
    options = ServingOptions(
        *(args.config, tuple(args.overrides), args.retriever, args.model, args.api), concurrency=sampler.concurrency
    )

    say = Progress.on(sys.stderr, stamp=lambda: time.strftime("%H:%M:%S "))
    try:
        with sole_writer(directory), serving(target, needs, options, directory, say) as served:
            job = EvalJob(served, methods, sets, sampler, judge)
            recipe = _recipe(job)
            store = open_store(directory, recipe, resume=args.resume)
            try:
                _ask(job, store)
            except BaseException:
                store.close()  # what ends now was ended by the stop
                if store.rows:
                    say(f"{len(store.rows)} episodes are in {directory}")
                    say(f"continue with: {_again(args, directory)}")
                raise
            store.close()
    except RunStopped as stopped:
        return 130 if stopped.number == signal.SIGINT else 1
    return _report(directory, recipe, store.rows, args)


def _again(args: argparse.Namespace, directory: Path) -> str:
    """Return the command that continues this evaluation."""
    out = "" if args.out else f" --out {shlex.quote(str(directory))}"
    return f"{args.again}{'' if args.resume else ' --resume'}{out}"


def _ask(job: EvalJob, store: ResultStore) -> None:
    from foray.evaluation.runner import ask_all, judge_all, open_questions, unjudged

    during = job.served.during
    asked = sum(job.sampler.n * len(open_questions(job, store, settings.type)) for settings in job.methods)
    during(lambda task: ask_all(job, store, task), "evaluating", asked, "episodes")
    if job.judge is not None:
        during(lambda task: judge_all(job, store, task), "judging", len(unjudged(store)), "episodes")


def _recipe(job: EvalJob) -> dict[str, Any]:
    from foray.evaluation import recipe
    from foray.evaluation.methods import POLICY
    from foray.evaluation.runner import prompts_of
    from foray.versions import foray_version

    served, sampler, judge = job.served, job.sampler, job.judge
    prompts = recipe.digest(vars(prompts_of(served)))
    template = recipe.template_of(served.environment)
    own: dict[str, dict[str, Any]] = {POLICY: {"template": template}} if served.rollout_url else {}
    return {
        "format": recipe.FORMAT,
        "foray": foray_version(),
        "subject": served.subject,
        "methods": {
            settings.type: own.get(settings.type) or {**settings.model_dump(mode="json"), "prompts": prompts}
            for settings in job.methods
        },
        "limits": recipe.limits_of(served.environment),
        "sampler": {name: getattr(sampler, name) for name in ("n", "temperature", "top_p", "top_k")},
        "search": sampler.search,
        "retriever": recipe.retriever_of(_info(served.search.urls[0]), served.search.topk) if served.search else None,
        "data": recipe.data_of(job.sets),
        "judge": {"model": judge.model, "instructions": recipe.digest(judge.instructions)} if judge else None,
    }


def _info(url: str) -> dict[str, Any] | None:
    """Return what a retriever says about its index, None if it has no `GET /info` (another project's server)."""
    from http.client import HTTPException

    from protocol.runtime.http.client import ask, read_json

    try:
        with ask(f"{url.rstrip('/')}/info", "viewer", "node", timeout_s=10.0) as response:
            found = read_json(response)
    except (OSError, HTTPException, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _judge(args: argparse.Namespace) -> JudgeSettings | None:
    from foray.evaluation.models import API_KEY
    from rollout_server.rewards.judge import JudgeSettings

    if not args.judge:
        return None
    if not args.judge_model:
        raise UserError("--judge needs the name of a model", todo="give --judge-model NAME")
    key = API_KEY if os.environ.get(API_KEY) else ""
    return JudgeSettings(url=args.judge, model=args.judge_model, api_key_variable=key)


def _other(directory: Path) -> EvalResult:
    from foray.evaluation.report import EvalResult
    from foray.evaluation.store import read_recipe, read_rows

    return EvalResult(directory.name, read_recipe(directory), read_rows(directory))


def _report(directory: Path, recipe: dict[str, Any], rows: list[dict[str, Any]], args: argparse.Namespace) -> int:
    """Write and print the report. Return the exit code."""
    from foray.evaluation.report import EvalResult, document_of, to_json
    from foray.evaluation.summary import summarise
    from foray.watch import page

    if not rows:
        raise UserError(f"{directory} holds no episodes", todo="evaluate into it again with --resume")
    order = {name: place for place, name in enumerate(recipe["methods"])}
    rows = sorted(rows, key=lambda row: order.get(row["method"], len(order)))
    summary: Summary = summarise(rows)
    others = [_other(path) for path in args.against]
    result = EvalResult(directory.absolute().name, recipe, rows)
    document, numbers = document_of(result, summary, others), to_json(result, summary, others)
    atomic_write(directory / "result.json", json.dumps(numbers, indent=1) + "\n", durable=False)
    atomic_write(directory / "report.md", page.to_markdown(document), durable=False)
    atomic_write(directory / "report.html", page.to_html(document), durable=False)
    if args.json:
        print(json.dumps(numbers))
    else:
        print(page.to_text(page.without(document, "Recipe")))
        print(f"\n{directory / 'report.html'}")
    return 1 if summary.failed or summary.mixed else 0
