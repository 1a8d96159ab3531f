"""Say what usually goes wrong in such runs and is seen in this one, what to try, and which trajectories show it.

Reads the files of the run directory: `metrics.jsonl`, the journal, the last checkpoint; running or finished. Searches
that do not find are explained by the run's corpus, if it is on this machine. The rules: docs/troubleshooting.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from deploy.run.run_dir import add_arguments, locate


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray diagnose`."""
    add_arguments(parser)
    parser.add_argument("--no-corpus", action="store_true", help="do not open the run's corpus")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0 if nothing was found, else 1."""
    from foray.watch.findings import diagnose

    facts = diagnose(locate(args, without_redis=True), corpus=not args.no_corpus)
    print(json.dumps(facts, ensure_ascii=False) if args.json else "\n".join(render(facts)))
    return 1 if facts["findings"] else 0


def render(facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the page."""
    from foray.watch.transcript import visible

    read = f"{facts['steps']} steps and the last {facts['trajectories']} trained trajectories"
    if not facts["findings"]:
        yield f"run {facts['run']}: nothing found in {read}; looked for {', '.join(facts['checked'])}"
        return
    yield f"run {facts['run']}: {len(facts['findings'])} findings in {read}"
    for one in facts["findings"]:
        yield f"\n{one['name']}: {visible(one['what'])}"
        yield f"  rule   {one['rule']}"
        yield from (f"  try    {visible(todo)}" for todo in one["todo"])
        for shown in one["trajectories"]:
            gold = " | ".join(map(visible, shown["gold"]))
            yield f"  see    {shown['replay']}"
            yield f"         trajectory {shown['index'] + 1}: reward {shown['reward']:g}, {shown['searches']} searches"
            said = visible(shown["answer"])[:200] or "(no answer)"
            yield f"         {visible(shown['question'])} -> {said} (gold: {gold})"
