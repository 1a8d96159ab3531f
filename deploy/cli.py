"""The `foray` command: find the verb, let it parse the rest, turn errors into words and exit codes.

Exit codes: 0 all is well, 1 the run (or the check) failed, 2 something a person must mend (usage, configuration),
75 another learner took over, 130 stopped by Ctrl-C. No verb imports torch, aiohttp or transformers to print its help.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from protocol.errors import Fenced, ForayError, UserError
from protocol.redaction import redact, remember_environment

EXIT_FAILED, EXIT_USER, EXIT_FENCED, EXIT_INTERRUPTED = 1, 2, 75, 130


@dataclass(frozen=True)
class Verb:
    """`module` has `configure` and `run`; a verb that is a process has `process`, the module of `python -m`."""

    help: str
    module: str = ""
    process: str = ""


VERBS: dict[str, Verb] = {
    "demo": Verb("teach a tiny model to search, on this machine, in minutes", "deploy.demo.command"),
    "init": Verb("write a configuration file to start from, every setting explained", "deploy.commands.init"),
    "up": Verb("start a whole run on this machine and watch it", "deploy.commands.up"),
    "down": Verb("stop a run", "deploy.commands.down"),
    "status": Verb("one look at a run: processes, engines, streams, ledger", "deploy.commands.status"),
    "top": Verb("the same, live: throughput, lag, reward, who waits for whom", "deploy.commands.top"),
    "dlq": Verb("dead letters and seqs that were given up: look, requeue, purge", "deploy.commands.dlq"),
    "compare": Verb("the demo under several algorithms, from one warm start", "deploy.demo.compare"),
    "curves": Verb("learning curves of several runs, side by side", "deploy.commands.curves"),
    "replay": Verb("print trained trajectories, with what the policy wrote and what it read", "deploy.commands.replay"),
    "export": Verb("write the policy of a checkpoint as a Hugging Face folder", "deploy.commands.export"),
    "eval": Verb("ask a running rollout server questions and score the answers", "deploy.commands.eval"),
    "doctor": Verb("look for what would stop a run, and say how to mend it", "deploy.commands.doctor"),
    "index": Verb("build a retriever's index, look into one, plan one", "deploy.commands.index"),
    "redis": Verb("run a Redis in the foreground, set up as a run needs it", "deploy.commands.redis"),
    "retriever": Verb("run one retriever", process="retriever"),
    "engine": Verb("run one engine node, or --attach it to an engine that runs already", process="rollout_server.node"),
    "rollout": Verb("run one rollout server", process="rollout_server"),
    "learner": Verb("run the learner", process="learner"),
    "bench": Verb("measure one part beside a baseline of the same run", "deploy.commands.bench"),
    "version": Verb("print the versions that matter in a bug report", "deploy.commands.version"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    remember_environment(os.environ)
    try:
        return _dispatch(given)
    except UserError as error:
        print(error.render(), file=sys.stderr)
        return EXIT_USER
    except Fenced as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return EXIT_FENCED
    except ForayError as error:
        print(redact(f"error: {error}"), file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has seen enough (`foray status | head`); Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(given: list[str]) -> int:
    if not given or given[0] in ("-h", "--help", "help"):
        print(overview())
        return 0 if given else EXIT_USER
    if given[0] in ("-V", "--version"):
        print(f"foray {foray_version()}")
        return 0
    name, rest = given[0], given[1:]
    verb = VERBS.get(name)
    if verb is None:
        near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.5)
        todo = f"did you mean `foray {near[0]}`?" if near else "`foray --help` lists the commands"
        raise UserError(f"unknown command {name!r}", todo=todo)
    if verb.process:
        return _become(verb.process, rest)
    module = importlib.import_module(verb.module)
    parser = argparse.ArgumentParser(
        prog=f"foray {name}", description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    module.configure(parser)
    code: int = module.run(parser.parse_intermixed_args(rest))
    return code


def _become(module: str, rest: list[str]) -> int:
    """Run `python -m module rest...` in this very process: same signals, same exit code, no second interpreter."""
    main_of = importlib.import_module(f"{module}.cli").main
    code: int = main_of(rest)
    return code


def overview() -> str:
    """The help of `foray` itself."""
    width = max(len(name) for name in VERBS)
    lines = [f"  {name:<{width}}  {verb.help}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: foray COMMAND [...]",
            "",
            "Train language models to reason and to search, by reinforcement learning.",
            "",
            "commands (each has --help):",
            *lines,
            "",
            "first steps: `foray demo`, then `foray init run.yaml` and `foray up run.yaml --dry-run`",
        ]
    )


def foray_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("foray")
    except PackageNotFoundError:
        return "(not installed)"
