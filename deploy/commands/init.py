"""Write a configuration file to start from: every setting with its default and what it means.

With --secure also a directory of secrets beside it: tokens and Redis users for each role, certificates, the settings of
a Redis that uses them, and the key that checkpoints are signed with. A file that exists then stays as it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import UserError

if TYPE_CHECKING:
    from deploy.config import RunConfig

PRESETS = Path(__file__).parents[1] / "presets"


def presets() -> list[str]:
    """Names of the shipped recipes."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Arguments of `foray init`."""
    parser.add_argument("file", type=Path, help="file to write, e.g. run.yaml")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="values to put in, e.g. run.model=/models/qwen"
    )
    parser.add_argument("--preset", choices=presets(), help="a published recipe to begin with (docs/presets.md)")
    parser.add_argument(
        "--force", action="store_true", help="replace what exists: the file, or with --secure the secrets"
    )
    parser.add_argument("--secure", action="store_true", help="make tokens, Redis users, certificates and a run key")
    parser.add_argument("--secrets", type=Path, help="directory of the secrets (default: `secrets` beside the file)")
    parser.add_argument(
        "--hosts",
        default="localhost,127.0.0.1",
        help="names and addresses of the host of Redis, the first for the URLs",
    )
    parser.add_argument("--redis-port", type=int, default=6379, help="port of that Redis (default: 6379)")
    parser.add_argument(
        "--no-tls", action="store_true", help="no certificates: for a Redis that only this host reaches"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 when all was written; raises UserError when it exists already."""
    from deploy.config import from_tree
    from deploy.reference.settings import document
    from protocol.runtime.config import read_tree

    directory = args.secrets or args.file.parent / "secrets"
    if args.file.exists() and (args.secure or not args.force):
        if not args.secure:
            raise UserError(f"{args.file} exists already", todo="take another name, or --force to replace it")
        config = from_tree(read_tree(args.file, args.overrides))
        print(f"{args.file} stays as it is; let it say launch.secrets: {directory.absolute()}")
        _secure(args, config, directory)
        return 0
    recipe = PRESETS / f"{args.preset}.yaml" if args.preset else None
    given = [f"launch.secrets={directory.absolute()}"] if args.secure else []
    given += _name(recipe, args.overrides)
    # `${NAME}` stays as it is: the file is to be read on other machines too
    config = from_tree(read_tree(recipe, [*given, *args.overrides]))
    if args.secure:
        _secure(args, config, directory)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    args.file.write_text(document(config))
    print(f"wrote {args.file}; next: foray doctor {args.file}, then foray up {args.file} --dry-run")
    return 0


def _name(recipe: Path | None, overrides: Sequence[str]) -> list[str]:
    """Overrides that give the run an id and a directory that no other run has, as far as the person gave none."""
    from deploy.launcher.run_dir import unique_id
    from protocol.runtime.config import read_tree
    from protocol.settings import RunSettings

    chosen = read_tree(None, overrides).get("run") or {}
    stem = (read_tree(recipe).get("run") or {}).get("id", RunSettings().id)
    run = chosen.get("id") or unique_id(stem)
    return [f"run.id={run}", *([] if "dir" in chosen else [f"run.dir=runs/{run}"])]


def _secure(args: argparse.Namespace, config: RunConfig, directory: Path) -> None:
    from deploy.secrets.files import RedisEndpoint, write_secrets

    hosts = tuple(host.strip() for host in args.hosts.split(",") if host.strip())
    if not hosts:
        raise UserError("--hosts names no host", todo="--hosts redis.example,10.0.0.5")
    place = RedisEndpoint(hosts, args.redis_port, not args.no_tls, config.launch.redis_maxmemory_mb)
    written = write_secrets(directory, config.run.id, place, force=args.force)
    width = max(len(item.path.name) for item in written)
    print(f"wrote {directory.absolute()} (mode 0700, files 0600) for run {config.run.id}; `foray up` hands out each:")
    for item in written:
        print(f"  {item.path.name:<{width}}  {item.use}")
