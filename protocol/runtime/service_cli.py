"""The command line of every service: `CONFIG a.b=c ...` or `--config CONFIG a.b=c ...`, logging, and exit codes."""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from protocol.errors import Fenced, NoSignal, UserError
from protocol.runtime.config import SettingsTree, not_an_override, read_tree
from protocol.runtime.log import LOG_FORMAT, start_logging
from protocol.runtime.net import allow_many_files

EXIT_USER, EXIT_NO_SIGNAL, EXIT_FENCED = UserError.exit_code, NoSignal.exit_code, Fenced.exit_code
"""Exit codes: the user must act; nothing can be learned from the run; another learner took over."""
NOT_RESTARTED = (EXIT_USER, EXIT_NO_SIGNAL, EXIT_FENCED)
"""A process that ends so would end so again."""
INTERRUPTED = (128 + signal.SIGINT, 128 + signal.SIGTERM, -signal.SIGINT, -signal.SIGTERM)
"""Exit codes of a learner that was stopped before its last step (as subprocess reports them)."""

Serve = Callable[[Namespace, SettingsTree], int | None]


def describe_exit(code: int) -> str:
    """Return how a process ended: `exited with code 1`, `was killed by SIGKILL`, `was stopped by SIGTERM`.

    code  128 + n, or -n, for signal n
    """
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"exited with code {code}" + (": no training signal" if code == EXIT_NO_SIGNAL else "")
    if code in INTERRUPTED:
        return f"was stopped by {name}"
    return f"was killed by {name}" + (" (out of memory?)" if number == signal.SIGKILL else "")


def run_service(
    parser: ArgumentParser, argv: Sequence[str] | None, serve: Serve, *, log_format: str = LOG_FORMAT, prefix: str = ""
) -> int:
    """Parse `argv`, set up logging and descriptors, load the settings and call `serve`. Return the exit code.

    parser  has the arguments of `add_config_arguments`
    serve   called with the arguments and the settings; returns the exit code, None for 0
    prefix  text before the message of a UserError
    """
    args = parser.parse_intermixed_args(argv)
    start_logging(os.environ, log_format)
    allow_many_files()
    return exit_code(lambda: serve(args, read_tree(*config_and_overrides(args))), prefix)


def exit_code(run: Callable[[], int | None], prefix: str = "") -> int:
    """Call `run` and return its exit code, 0 for None. Print a UserError to stderr and return 2 (NoSignal: 65)."""
    try:
        return run() or 0
    except UserError as error:
        print(prefix + error.render(), file=sys.stderr)
        return error.exit_code


def add_config_arguments(
    parser: ArgumentParser, what: str, example: str, *, metavar: str = "CONFIG", secrets: bool = False
) -> None:
    """Add positional CONFIG and overrides, --config for scripts and, with `secrets`, --secrets.

    what  description of CONFIG for the help
    """
    text = f"{what}; and overrides, e.g. {example}"
    parser.add_argument("given", nargs="*", metavar=f"{metavar} | key=value", help=text)
    parser.add_argument("--config", type=Path, metavar="CONFIG", help="the same as the positional CONFIG")
    if secrets:
        parser.add_argument("--secrets", type=Path, metavar="DIR", help="the same as launch.secrets=DIR")


def add_port_file_argument(parser: ArgumentParser) -> None:
    """Add --port-file."""
    parser.add_argument(
        "--port-file", type=Path, help="file to write the port to, atomically, once the service listens"
    )


def config_and_overrides(args: Namespace) -> tuple[Path | None, list[str]]:
    """Return the configuration and the overrides. Raises UserError if the arguments name two configurations."""
    paths, overrides = split_overrides(args.given)
    if args.config is not None:
        paths = [args.config, *paths]
    if len(paths) > 1:
        raise not_an_override(str(paths[1]))
    if getattr(args, "secrets", None) is not None:
        overrides.append(f"launch.secrets={args.secrets}")
    return (paths[0] if paths else None), overrides


def split_overrides(given: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Return (paths, overrides): an override contains `=` and is not an existing file."""
    # Path.exists raises if a name is too long, os.path.exists does not
    paths = [Path(item) for item in given if "=" not in item or os.path.exists(item)]
    return paths, [item for item in given if Path(item) not in paths]
