"""Submit a run to Slurm: a core job and an array of engines. Call it again to change `launch.engines`.

The scripts are written to RUN_DIR/slurm from a template with the settings of your site (--template). `foray status`,
`top`, `logs`, `dashboard` and `down` work on a login node, by the run directory, which all nodes must share.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.redis.url import redacted_override
from protocol.runtime.service_cli import add_config_arguments, config_and_overrides


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray submit`."""
    add_config_arguments(parser, "YAML file, as for `foray up`", "launch.engines=4")
    parser.add_argument("--template", type=Path, metavar="FILE", help="write the template to FILE, and submit nothing")
    parser.add_argument("--dry-run", action="store_true", help="print both scripts, and submit nothing")


def run(args: argparse.Namespace) -> int:
    """Return 0 when the jobs are submitted."""
    from deploy.config import load_config
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
    if secret := [word for word in overrides if redacted_override(word) != word]:
        raise UserError(f"{redacted_override(secret[0])} contains a password", todo="use launch.secrets")
    config = load_config(path, overrides)
    given = [str(path.absolute()), *overrides]
    if args.dry_run:
        slurm.check(config)
        print("\n".join(slurm.render(config, given, part) for part in ("core", "engine")), end="")
        return 0
    print("\n".join(slurm.submit(config, given)) or "all jobs are there")
    print(f"next: {shlex.join(['foray', 'status', str(config.run.dir)])}")
    return 0
