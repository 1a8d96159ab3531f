"""Check this machine, or a configuration on it, for problems that would stop a run, and suggest fixes."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from protocol.runtime.service_cli import add_config_arguments, config_and_overrides


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray doctor`."""
    add_config_arguments(
        parser, "a run's configuration; without it, check only the machine", "run.model=/models/qwen", secrets=True
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0 if nothing would stop a run (warnings allowed), else 1."""
    from deploy.config import load_config
    from deploy.doctor.run import examine

    path, overrides = config_and_overrides(args)
    findings = examine(load_config(path, overrides) if path else None, path)
    failed = any(f.verdict == "fail" for f in findings)
    if args.json:
        print(json.dumps({"healthy": not failed, "findings": [asdict(f) for f in findings]}))
        return int(failed)
    width = max(len(f.check) for f in findings)
    for finding in findings:
        print(f"{finding.verdict:<4}  {finding.check:<{width}}  {finding.detail}")
        if finding.why:
            print(f"{'':<4}  {'':<{width}}  why: {finding.why}")
        if finding.fix:
            print(f"{'':<4}  {'':<{width}}  do: {finding.fix}")
    return int(failed)
