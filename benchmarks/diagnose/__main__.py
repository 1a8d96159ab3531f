"""Whether `foray diagnose` finds what is wrong: runs broken on purpose and healthy ones, one result file each.

    python -m benchmarks.diagnose thresholds     breakages and healthy runs, seeds 0 to 2: thresholds may be set on them
    python -m benchmarks.diagnose broken         another breakage of each kind, another seed: judged
    python -m benchmarks.diagnose healthy        four healthy runs with other seeds: judged
    python -m benchmarks.diagnose table          the judged runs: found, not found, false alarms; docs/diagnose.md

Each run writes docs/figures/diagnose/NAME.json and is not repeated while that file exists: commit each, and start the
command again after an interruption. A run is the ring of `foray demo` without its evaluations. Its directory stays in
runs/diagnose, so that a changed threshold is judged again by `--again`, without a run, where that directory still is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.base import Say, machine_facts
from benchmarks.collapse import LR, train, warm_model
from benchmarks.collapse import Planned as Collapsing
from benchmarks.diagnose.breakages import KINDS, Breakage, engine, searching
from deploy.config import RunConfig
from deploy.launch.process import ProcessFailed
from deploy.run.history import read_steps
from protocol.runtime.files import atomic_write
from protocol.runtime.http.body import parse_json

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "figures" / "diagnose"
TEMPLATE, PAGE = FOLDER / "page.template", ROOT / "docs" / "diagnose.md"
RUNS = Path("runs/diagnose")
CHOSEN, JUDGED, HEALTHY = (0, 1, 2), 10, (30, 31, 32, 33)
"""Seeds: thresholds may be set on runs with the first; the others judge, until a run that was judged is used, too."""


@dataclass(frozen=True)
class Planned:
    """A run: the finding that is expected ("": healthy), which of its breakages, a seed, the level of a healthy one."""

    kind: str
    variant: int
    seed: int
    level: str = "demo"

    @property
    def name(self) -> str:
        """Return the name of its result file."""
        return f"{self.kind or 'healthy'}-{self.variant if self.kind else self.breakage.level}-seed{self.seed}"

    @property
    def breakage(self) -> Breakage:
        """Return what differs from the demo."""
        return KINDS[self.kind][self.variant] if self.kind else Breakage(level=self.level)

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return its settings, without the address of another retriever."""
        steps = (f"run.steps={self.breakage.steps}", f"learner.optim.lr={LR[self.breakage.level]}")
        return (*steps, "learner.checkpoint_every=20", *self.breakage.overrides)


def planned(phase: str) -> list[Planned]:
    """Return the runs of a phase in their order."""
    later = [[Planned(kind, n, JUDGED * n + i) for n in range(1, len(KINDS[kind]))] for i, kind in enumerate(KINDS)]
    if phase == "broken":
        return [runs[-1] for runs in later]
    if phase == "healthy":
        return [Planned("", 0, seed, "hard" if seed % 2 else "demo") for seed in HEALTHY]
    healthy = [Planned("", 0, seed, level) for seed in CHOSEN for level in LR]
    once_judged = [run for runs in later for run in runs[:-1]]
    return [*(Planned(kind, 0, seed) for seed in CHOSEN for kind in KINDS), *once_judged, *healthy]


def play(run: Planned, say: Say) -> dict[str, Any]:
    """Run it, or go on with it, and return its result. A run that stops itself, as some broken ones do, is a result."""
    directory, ended, began = RUNS / run.name, "", time.monotonic()
    broken, model = run.breakage, warm_model(Collapsing("", "", run.seed, run.breakage.level), say)
    corpus = RUNS / f"{run.name}-corpus.jsonl"
    with searching(broken, run.seed, corpus) as search, engine(broken, model) as attached:
        if (broken.search == "random" or attached) and directory.exists():
            shutil.rmtree(directory)  # its configuration has the address of a server that has ended
        try:
            train(directory, lambda: _prepared(run, directory, model, (*search, *attached), say), say, to_end=True)
        except ProcessFailed as error:
            if not run.kind:
                raise
            ended = str(error)
    cpu_s = float((directory / "cpu_s").read_text())
    cost = {"cpu_s": round(cpu_s, 1), "seconds": round(time.monotonic() - began, 1)}
    facts = judged(directory) | cost | {"ended": ended, "machine": machine_facts()}
    return asdict(run) | {"overrides": run.overrides} | facts


def judged(directory: Path) -> dict[str, Any]:
    """Return what `foray diagnose` says about a run directory, without the texts of trajectories."""
    from foray.cli import main as foray

    with redirect_stdout(StringIO()) as said:
        code = foray(["diagnose", str(directory), "--json"])
    facts = parse_json(said.getvalue().encode())
    assert code == bool(facts["findings"])
    rewards = [step.get("reward_mean") for step in read_steps(directory / "metrics.jsonl").values()]
    return {
        "findings": {
            one["name"]: {"what": one["what"], "todo": one["todo"], "seqs": [t["seq"] for t in one["trajectories"]]}
            for one in facts["findings"]
        },
        "rewards": [round(reward, 3) for reward in rewards if reward is not None],
    }


def _prepared(run: Planned, directory: Path, model: Path, more: Sequence[str], say: Say) -> RunConfig:
    from foray.demo.run import DemoOptions, prepare

    hard = run.breakage.level == "hard"
    overrides = (*run.overrides, *more)
    return prepare(DemoOptions(directory, run.seed, False, model, overrides, fresh=True, hard=hard), say).config


def rows(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table, one row for each run: what was expected, and what was found."""
    head = "| run | expected | found | first line of the finding | also found | steps | CPU s |"
    lines = [head, "|---|---|---|---|---|---|---|"]
    for result in results:
        kind, found = result["kind"], result["findings"]
        verdict = ("yes" if kind in found else "no") if kind else ("false alarm" if found else "")
        name = Planned(**{field.name: result[field.name] for field in fields(Planned)}).name
        what = found.get(kind, {}).get("what", "").replace("|", "/")
        others = ", ".join(other for other in found if other != kind)
        cells = (name, kind or "nothing", verdict, what, others, len(result["rewards"]), f"{result['cpu_s']:.0f}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def write_table() -> None:
    """Write docs/diagnose.md from the results that there are."""
    parts: dict[str, str] = {}
    count = {"found": 0, "broken": 0, "alarms": 0, "healthy": 0}
    for phase in ("broken", "healthy", "thresholds"):
        paths = [FOLDER / f"{run.name}.json" for run in planned(phase)]
        results = [json.loads(path.read_text()) for path in paths if path.exists()]
        parts[f"{phase}_rows"] = "\n".join(rows(results)) if results else "Not run yet."
        if phase == "broken":
            count |= {"broken": len(results), "found": sum(r["kind"] in r["findings"] for r in results)}
        if phase == "healthy":
            count |= {"healthy": len(results), "alarms": sum(bool(r["findings"]) for r in results)}
    text = Template(TEMPLATE.read_text()).substitute(parts | {name: str(number) for name, number in count.items()})
    atomic_write(PAGE, text.encode(), durable=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the runs of a phase that have no result yet, judge runs again, or write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.diagnose", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("phase", choices=["thresholds", "broken", "healthy", "table"])
    parser.add_argument("--kind", choices=[*KINDS], help="only runs of this kind")
    parser.add_argument("--most", type=int, default=1_000, metavar="N", help="make at most N runs")
    parser.add_argument("--again", action="store_true", help="diagnose the runs again that are in runs/diagnose")
    args = parser.parse_args(argv)
    if args.phase == "table":
        write_table()
        return 0
    # the rollout servers import this module's rewards
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)

    runs = [run for run in planned(args.phase) if args.kind in (None, run.kind)]
    missing = [run for run in runs if args.again == (FOLDER / f"{run.name}.json").exists()]
    if args.again:
        missing = [run for run in missing if (RUNS / run.name).is_dir()]
    for run in missing[: args.most]:
        path = FOLDER / f"{run.name}.json"
        say(f"{run.name}: {' '.join(run.overrides)}")
        result = json.loads(path.read_text()) | judged(RUNS / run.name) if args.again else play(run, say)
        say(f"{run.name}: {', '.join(result['findings']) or 'nothing found'}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        atomic_write(path, (json.dumps(result) + "\n").encode(), durable=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
