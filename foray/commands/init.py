"""Write a configuration file with the settings that matter, their defaults and meaning.

With --secure also write a directory of secrets next to it: tokens and Redis users for each role, certificates, a Redis
configuration that uses them, and the key that signs checkpoints. An existing configuration file is then kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.hardware.inventory import CPU, HARDWARE
from protocol.errors import UserError
from protocol.runtime.files import atomic_write

if TYPE_CHECKING:
    from deploy.config import RunConfig

PRESETS = Path(__file__).parents[1] / "presets"


def presets() -> list[str]:
    """Return the names of the presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray init`."""
    parser.add_argument("file", type=Path, help="file to write, e.g. run.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values to set, e.g. run.model=/models/qwen")
    parser.add_argument("--preset", choices=presets(), help="start from a published recipe (docs/presets.md)")
    parser.add_argument(
        "--hardware", choices=(CPU, *HARDWARE), help="with --preset: settings for a machine (docs/hardware.md)"
    )
    parser.add_argument("--model", type=Path, metavar="DIR", help="run.model, made absolute")
    parser.add_argument("--data", type=Path, metavar="FILE", help="learner.questions, made absolute")
    parser.add_argument("--index", type=Path, metavar="DIR", help="retriever.index_dir, made absolute")
    parser.add_argument(
        "--force", action="store_true", help="replace an existing file, or with --secure existing secrets"
    )
    parser.add_argument("--secure", action="store_true", help="create tokens, Redis users, certificates and a run key")
    parser.add_argument("--secrets", type=Path, help="directory for the secrets (default: `secrets` next to the file)")
    parser.add_argument(
        "--hosts",
        default="localhost,127.0.0.1",
        help="names and addresses of the Redis host; the first one is used in URLs",
    )
    parser.add_argument("--redis-port", type=int, default=6379, help="port of that Redis (default: 6379)")
    parser.add_argument(
        "--no-tls", action="store_true", help="create no certificates: for a Redis reachable from this host only"
    )


def run(args: argparse.Namespace) -> int:
    """Return 0 when all is written. Raises UserError if a file already exists."""
    from deploy.config import from_tree
    from foray.settings_file import document
    from protocol.runtime.config import override, read_tree

    directory = args.secrets or args.file.parent / "secrets"
    if args.file.exists() and (args.secure or not args.force):
        if not args.secure:
            raise UserError(f"{args.file} already exists", todo="choose another name, or replace it with --force")
        config = from_tree(read_tree(args.file, args.overrides))
        print(f"{args.file} is unchanged; set launch.secrets: {directory.absolute()} in it")
        _secure(args, config, directory)
        return 0
    recipe = PRESETS / f"{args.preset}.yaml" if args.preset else None
    given = [override("launch.secrets", directory.absolute())] if args.secure else []
    given += _name(recipe, args.overrides)
    files = {"run.model": args.model, "learner.questions": args.data, "retriever.index_dir": args.index}
    given += [override(setting, path.absolute()) for setting, path in files.items() if path is not None]
    if args.hardware:
        return _for_hardware(args, recipe, given, directory)
    # keep `${NAME}`: the file may be used on other machines
    config = from_tree(read_tree(recipe, [*given, *args.overrides]))
    if args.secure:
        _secure(args, config, directory)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(args.file, document(config), durable=False)
    print(f"wrote {args.file}; next: foray doctor {args.file}, then foray up {args.file} --dry-run")
    return 0


def _for_hardware(args: argparse.Namespace, recipe: Path | None, given: Sequence[str], directory: Path) -> int:
    """Write the preset with the settings of a hardware profile. Return 0. Raises UserError if it does not fit."""
    from deploy.config import from_tree
    from deploy.hardware.assign import placement_lines
    from deploy.hardware.profiles import choices, document, resolve
    from deploy.hardware.run import built_index
    from protocol.runtime.config import read_tree
    from protocol.runtime.number_format import read_facts

    if recipe is None:
        raise UserError("--hardware needs --preset", todo="add --preset NAME")
    tree = read_tree(recipe, [*given, *args.overrides])
    config = from_tree(tree)
    facts = read_facts(config.run.model)
    found = resolve(tree, args.hardware, facts, built_index(config))
    if args.secure:
        _secure(args, found.config, directory)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    title = f"preset {args.preset} for {args.hardware} (docs/presets.md, docs/hardware.md)"
    atomic_write(args.file, document(found, title), durable=False)
    if found.placement.gpus:
        print("\n".join(placement_lines(found.placement, {})))
        print(", ".join(f"{name} {value}" for name, value in choices(found, facts).items()))
    print(f"wrote {args.file}; next: foray doctor {args.file}, then foray up {args.file} --dry-run")
    return 0


def _name(recipe: Path | None, overrides: Sequence[str]) -> list[str]:
    """Return overrides for a unique run id and directory, unless `overrides` sets them."""
    from deploy.run.run_dir import unique_id
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
        raise UserError("--hosts is empty", todo="give names or addresses, e.g. --hosts redis.example,10.0.0.5")
    place = RedisEndpoint(hosts, args.redis_port, not args.no_tls, config.launch.redis_maxmemory_mb)
    written = write_secrets(directory, config.run.id, place, force=args.force)
    width = max(len(item.path.name) for item in written)
    print(f"wrote {directory.absolute()} (mode 0700, files 0600) for run {config.run.id}; `foray up` distributes them:")
    for item in written:
        print(f"  {item.path.name:<{width}}  {item.use}")
