"""Submit a run to Slurm: a core job and an array of engines. Call it again to submit what is missing.

The scripts are written to RUN_DIR/slurm from a template with the settings of your site (--template). `foray status`,
`top`, `logs`, `scale`, `dashboard` and `down` work on a login node, by the run directory, which all nodes must share.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from deploy.config import RunConfig, load_config
from protocol.errors import UserError
from protocol.runtime.redis.url import redacted_override
from protocol.runtime.service_cli import add_config_arguments, config_and_overrides


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray submit`."""
    add_config_arguments(parser, "YAML file, as for `foray up`", "launch.engines=4")
    parser.add_argument("--template", type=Path, metavar="FILE", help="write the template to FILE, and submit nothing")
    parser.add_argument("--dry-run", action="store_true", help="print both scripts, and submit nothing")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the jobs are submitted."""
    from deploy.launch import slurm

    if args.template is not None:
        if args.template.exists():
            raise UserError(f"{args.template} exists", todo="choose another file")
        shutil.copyfile(slurm.TEMPLATE, args.template)
        print(f"wrote {args.template}\nnext: edit it, and set launch.slurm.template={args.template}")
        return 0
    path, overrides = config_and_overrides(args)
    if path is None:
        raise UserError("`foray submit` needs a configuration", todo="`foray init run.yaml` writes one")
    config = load_config(path, overrides)
    if args.dry_run:
        slurm.check(config)
        print("\n".join(slurm.render(config, _given(path, overrides), part) for part in ("core", "engine")), end="")
        return 0
    return submit(config, path, overrides, as_json=args.json)


def submit(config: RunConfig, path: Path, overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Submit the jobs that are missing, print them and return 0. Raises UserError if Slurm refuses."""
    from deploy.launch import slurm

    said = slurm.submit(config, _given(path, overrides))
    if as_json:
        print(json.dumps({"run": config.run.id, "dir": str(config.run.dir), "jobs": said}))
        return 0
    print("\n".join(said) or "all jobs are there")
    print(f"next: {shlex.join(['foray', 'status', str(config.run.dir)])}")
    return 0


def _given(path: Path, overrides: Sequence[str]) -> list[str]:
    if secret := [word for word in overrides if redacted_override(word) != word]:
        raise UserError(f"{redacted_override(secret[0])} contains a password", todo="use launch.secrets")
    return [str(path.absolute()), *overrides]
