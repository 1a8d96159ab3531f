"""The `foray` command: select the verb, let it parse its arguments, turn errors into messages and exit codes.

Exit codes: 0 success, 1 the run (or the check) failed, 2 the user must act (usage, configuration), 65 no training
signal, 75 another learner took over, 130 stopped by Ctrl-C, 143 by SIGTERM. `--help` never imports torch, aiohttp or
transformers.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from foray.versions import foray_version
from protocol.errors import ForayError, UserError
from protocol.redaction import remember_environment
from protocol.runtime.files import FREE_SPACE, is_full
from protocol.runtime.lifecycle import Terminated, terminating
from protocol.runtime.log import LOG_LEVEL_VARIABLE, LOG_LEVELS
from protocol.runtime.net import allow_many_files
from protocol.runtime.redis.url import redacted_override
from protocol.runtime.service_cli import EXIT_USER
from protocol.runtime.settings_errors import suggest

EXIT_INTERRUPTED = 130
ROOT = Path(__file__).parent.parent
"""Where the packages are: the checkout, or site-packages."""


@dataclass(frozen=True)
class Verb:
    """One command. `module` has `configure` and `run`; for a service, `process` is the module of `python -m`.

    A module of `benchmarks` needs a checkout: the wheel does not contain it.
    """

    help: str
    module: str = ""
    process: str = ""


VERBS: dict[str, Verb] = {
    "demo": Verb("train a tiny model to search, on this machine, in minutes", "foray.demo.command"),
    "demo-lm": Verb("train a pretrained model on real questions (needs a checkout)", "benchmarks.demo_lm.command"),
    "init": Verb("write a configuration file with the settings that matter explained", "foray.commands.init"),
    "sft": Verb("train a model on demonstrations: the warm start of a run", "foray.commands.sft"),
    "up": Verb("start all processes of a run on this machine and monitor them", "foray.commands.up"),
    "submit": Verb("submit a run to Slurm, or change its number of engines", "foray.commands.submit"),
    "down": Verb("stop a run", "foray.commands.down"),
    "scale": Verb("set the number of engines of a run while it goes on", "foray.commands.scale"),
    "status": Verb("show a run: its processes, engines, streams, ledger, problems", "foray.commands.watch.status"),
    "diagnose": Verb("say what goes wrong in a run, and what to try", "foray.commands.watch.diagnose"),
    "top": Verb("show a run live: throughput, lag, reward, bottleneck", "foray.commands.watch.top"),
    "dashboard": Verb("show a run in the browser: curves, engines, trajectories", "foray.commands.watch.dashboard"),
    "runs": Verb("list runs: state, step, age, reward", "foray.commands.watch.runs"),
    "logs": Verb("show the logs of a run's processes, merged by time", "foray.commands.watch.logs"),
    "grafana": Verb("write a Grafana dashboard and Prometheus rules for a run", "foray.commands.watch.grafana"),
    "report": Verb("write a run's report as one HTML file", "foray.commands.watch.report"),
    "dlq": Verb("list, show, requeue and purge dead letters and failed seqs", "foray.commands.dlq"),
    "compare": Verb("run the demo with several algorithms from one warm start", "foray.demo.compare"),
    "curves": Verb("print or plot the learning curves of runs, side by side", "foray.commands.watch.curves"),
    "replay": Verb("print trained trajectories: what the policy wrote and read", "foray.commands.watch.replay"),
    "export": Verb("write the policy of a checkpoint as a Hugging Face model", "foray.commands.export"),
    "eval": Verb("evaluate a run, checkpoint, model or endpoint on data sets, beside baselines", "foray.commands.eval"),
    "serve": Verb("serve a run, checkpoint or model to OpenAI's clients, with its search", "foray.commands.serve"),
    "ask": Verb("ask a trained policy one question, in the terminal", "foray.commands.chat"),
    "chat": Verb("ask a trained policy questions, in the terminal", "foray.commands.chat"),
    "doctor": Verb("check a machine or a configuration for problems and suggest fixes", "foray.commands.doctor"),
    "data": Verb("download, convert, inspect, mix and compare questions and corpora", "foray.commands.data"),
    "index": Verb("build, inspect, verify, search or size a search index", "foray.commands.index"),
    "redis": Verb("run a Redis in the foreground, with the settings that a run needs", "foray.commands.redis"),
    "retriever": Verb("run one retriever", process="retriever"),
    "engine": Verb(
        "run one engine node, or --attach to an SGLang server you already run", process="rollout_server.node"
    ),
    "rollout": Verb("run one rollout server", process="rollout_server"),
    "learner": Verb("run the learner", process="learner"),
    "bench": Verb("benchmark one part against a baseline (needs a checkout)", "benchmarks.command"),
    "version": Verb("print the versions to include in a bug report", "foray.commands.version"),
}


MEANT = {
    "`foray up run.yaml` trains; `foray demo` needs no configuration": ("train", "run", "start", "launch", "fit"),
    "`foray down RUN_DIR`": ("stop", "kill", "shutdown", "quit"),
    "`foray chat RUN_DIR` asks it questions; `foray serve RUN_DIR` answers programs": (
        *("infer", "inference", "generate", "predict", "test"),
    ),
    "`foray logs RUN_DIR -f`": ("log", "tail"),
    "`foray runs` lists runs, `foray status RUN_DIR` shows one": ("ps", "list", "ls", "show"),
    "`foray grafana RUN_DIR`": ("prometheus", "alerts"),
    "`foray top RUN_DIR` in the terminal, `foray dashboard RUN_DIR` in the browser": ("watch", "monitor", "ui", "view"),
    "`foray doctor run.yaml`": ("check", "validate", "lint"),
    "`foray index build --corpus FILE --out DIR`": ("build", "corpus"),
    "`foray data list` and `foray data get NAME`": ("download", "get", "fetch", "dataset", "datasets"),
    "`foray sft DEMONSTRATIONS --model DIR --out DIR` trains on demonstrations": ("finetune", "warmstart", "tune"),
    "`foray data convert FILE OUT`; a run reads most files as they are (docs/data.md)": ("convert", "preprocess"),
    "`foray init run.yaml` writes one; `foray up run.yaml --dry-run` prints it with every default": ("config", "new"),
    "`foray curves RUN_DIR`": ("plot", "metrics"),
}
"""Advice -> names of commands that other programs have."""


CONTINUED = {("index", "build"), ("data", "get")}
"""Commands that resume after a signal and print no summary themselves."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    given = list(sys.argv[1:] if argv is None else argv)
    remember_environment(os.environ)
    allow_many_files()
    try:
        return _dispatch(_without_log_level(given))
    except ForayError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Terminated as stopped:
        return int(str(stopped.code))
    except BrokenPipeError:
        # The reader closed the pipe (`foray status | head`); without this, Python reports the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if not (isinstance(error.filename, str) or is_full(error)) or os.environ.get(LOG_LEVEL_VARIABLE) == "DEBUG":
            raise
        print(unusable(error).render(), file=sys.stderr)
        return EXIT_USER


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
        raise UserError(f"unknown command {name!r}", todo=_meant(name))
    if verb.process:
        return _become(verb.process, rest, prog=f"foray {name}")
    if verb.module.startswith("benchmarks.") and not (ROOT / "benchmarks").is_dir():
        raise UserError(
            f"`foray {name}` needs a checkout of the repository: the installed package does not contain it",
            todo=f"clone the repository, run `make setup` in it, then `.venv/bin/foray {name}`",
        )
    module = importlib.import_module(verb.module)
    if not hasattr(module, "subcommands"):
        parser = Parser(f"foray {name}", module.__doc__)
        module.configure(parser)
    else:
        parser, rest = _subcommand(name, module, rest)
    args = parser.parse_intermixed_args(rest)
    args.again = shlex.join(["foray", *map(redacted_override, given)])
    try:
        with terminating():
            code: int = module.run(args)
    except (KeyboardInterrupt, Terminated):
        if (name, getattr(args, "action", "")) in CONTINUED:
            print(f"continue with: {args.again}", file=sys.stderr)
        raise
    return code


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises UserError instead of printing the usage of every flag."""

    def __init__(self, prog: str, description: str | None) -> None:
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=form, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UserError that suggests the nearest name or flag."""
        todo = f"{self.prog} --help"
        if choice := re.match(r"(argument .+): invalid choice: '(.*)' \(choose from (.*)\)$", message):
            names = [name.strip("'\"") for name in choice[3].split(", ")]
            raise UserError(f"{choice[1]}: unknown value {choice[2]!r}", todo=suggest(choice[2], names))
        if unknown := re.match(r"unrecognized arguments: (--[\w-]+)", message):
            flags = sorted(set(re.findall(r"--[\w-]+", self.format_help())))
            todo = f"{suggest(unknown[1], flags)}; {todo} explains them"
        raise UserError(message, todo=todo)


def _subcommand(name: str, module: ModuleType, rest: list[str]) -> tuple[Parser, list[str]]:
    """Return the parser of the subcommand named in `rest` (the first word that is not a flag), and the remaining words.

    A module with subcommands lists them in `subcommands()`, name -> help, and `configure` takes the chosen one.
    """
    known: dict[str, str] = module.subcommands()
    chosen = next((word for word in rest if not word.startswith("-")), None)
    if chosen is None:
        width = max(map(len, known))
        parser = Parser(f"foray {name}", module.__doc__)
        parser.usage = f"foray {name} NAME [...]"
        parser.epilog = "\n".join(["NAME (each has --help):", *(f"  {n:<{width}}  {h}" for n, h in known.items())])
        parser.parse_args(rest)
        raise UserError(f"`foray {name}` needs a subcommand", todo=f"give one of {', '.join(known)}")
    if chosen not in known:
        raise UserError(f"unknown command `foray {name} {chosen}`", todo=suggest(chosen, tuple(known)))
    parser = Parser(f"foray {name} {chosen}", known[chosen])
    parser.set_defaults(action=chosen)
    module.configure(parser, chosen)
    return parser, [word for place, word in enumerate(rest) if place != rest.index(chosen)]


def _meant(name: str) -> str:
    for there_is, names in MEANT.items():
        if name in names:
            return there_is
    near = difflib.get_close_matches(name, VERBS, n=1, cutoff=0.6)
    return f"did you mean `foray {near[0]}`?" if near else "`foray --help` lists the commands"


def _without_log_level(given: list[str]) -> list[str]:
    """Return `given` without -v, --verbose and --log-level LEVEL; set the level for this process and its children."""
    rest: list[str] = []
    words = iter(given)
    for word in words:
        level = ""
        if word in ("-v", "--verbose"):
            level = "DEBUG"
        elif word == "--log-level" or word.startswith("--log-level="):
            level = (word.partition("=")[2] or next(words, "")).upper()
            if level not in LOG_LEVELS:
                raise UserError(f"unknown --log-level {level!r}", todo=suggest(level, LOG_LEVELS))
        else:
            rest.append(word)
        if level:
            os.environ[LOG_LEVEL_VARIABLE] = level
    return rest


def unusable(error: OSError) -> UserError:
    """Return the UserError for a full disk, or for a path that cannot be read or written."""
    if is_full(error):
        return UserError("the disk is full", why=str(error), todo=FREE_SPACE)
    return UserError(
        f"cannot read or write {error.filename}",
        why=error.strerror or str(error),
        todo="give another path, or correct its permissions; `foray -v ...` shows the traceback",
    )


def _become(module: str, rest: list[str], *, prog: str) -> int:
    """Run `python -m module rest...` in this process: same signals, same exit code, no second interpreter."""
    main_of = importlib.import_module(f"{module}.cli").main
    code: int = main_of(rest, prog=prog)
    return code


def overview() -> str:
    """Return the help of `foray` itself."""
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
            "for every command: -v, or --log-level DEBUG|INFO|WARNING|ERROR, also for the processes that it starts",
            "first steps: `foray demo`, then `foray init run.yaml` and `foray up run.yaml --dry-run`",
        ]
    )
