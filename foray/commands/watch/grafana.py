"""Write a Grafana dashboard, Prometheus rules and a scrape configuration for a run.

Import OUT/grafana.json in Grafana (Dashboards, New, Import). `prometheus --config.file=OUT/prometheus.yml` scrapes the
run's processes at the addresses that they have now; without a run that file is not written.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from deploy.run.run_dir import Located, add_arguments, locate
from protocol.errors import UserError

RULES_NAME = "rules.yml"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray grafana`."""
    parser.add_argument("--out", type=Path, default=Path("monitoring"), help="directory (default: ./monitoring)")
    parser.add_argument(
        "--token-file", type=Path, help="file with the viewer token, if the run has tokens; Prometheus reads it"
    )
    add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 when the files are written."""
    from foray.watch.grafana import RULES, dashboard

    try:
        found = locate(args)
    except UserError:
        if args.given or args.config:
            raise
        found = None
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "grafana.json").write_text(json.dumps(dashboard(), indent=1) + "\n")
    shutil.copyfile(RULES, args.out / RULES_NAME)
    if found is not None:
        (args.out / "prometheus.yml").write_text(_scrape_config(found, args.token_file))
    shown = ["grafana.json", RULES_NAME, *(["prometheus.yml"] if found else [])]
    print(f"wrote {', '.join(str(args.out / name) for name in shown)}")
    scrape = (
        f"prometheus --config.file={args.out}/prometheus.yml" if found else "name a run for its scrape configuration"
    )
    print(f"next: {scrape}; in Grafana: Dashboards, New, Import, {args.out}/grafana.json")
    return 0


def _scrape_config(found: Located, token: Path | None) -> str:
    import yaml

    from deploy.run.snapshot import take_snapshot
    from foray.watch.grafana import scrape_config

    seen = take_snapshot(found.redis_url, found.run.id)
    # Prometheus sends the token of --token-file to all of them
    targets = {kind: found.urls(seen, kind) for kind in ("learner", "rollout", "retriever")}
    targets["engine"] = [engine.url for engine in seen.engines] if found.is_own or not token else []
    config = scrape_config(found.run.id, targets, RULES_NAME, str(token.absolute()) if token else "")
    head = f"# Written by `foray grafana` for run {found.run.id}: write it again when addresses have changed.\n"
    return head + yaml.safe_dump(config, sort_keys=False)
