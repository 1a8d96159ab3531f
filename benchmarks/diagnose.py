"""Whether `foray diagnose` finds what is wrong: runs broken on purpose and healthy ones, one result file each.

    python -m benchmarks.diagnose thresholds     breakages and healthy runs, seeds 0 to 2: thresholds may be set on them
    python -m benchmarks.diagnose broken         another breakage of each kind, another seed: judged
    python -m benchmarks.diagnose healthy        four healthy runs with other seeds: judged
    python -m benchmarks.diagnose table          the judged runs: found, not found, false alarms; docs/diagnose.md

Each run writes docs/figures/diagnose/NAME.json and is not repeated while that file exists: commit each, and start the
command again after an interruption. A run is the ring of `foray demo` without its evaluations. Its directory stays in
runs/diagnose, so that a changed threshold is judged again by `--again`, without a run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, fields
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from string import Template
from typing import Any

from benchmarks.base import Say, machine_facts
from benchmarks.collapse import LR, SEARCH_R1, train, warm_model
from benchmarks.collapse import Planned as Collapsing
from deploy.config import RunConfig
from deploy.run.history import read_steps
from protocol.errors import ForayError
from protocol.runtime.files import atomic_write
from protocol.runtime.http.body import parse_json
from rollout_server.rewards.base import RewardInput

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "figures" / "diagnose"
TEMPLATE, PAGE = FOLDER / "page.template", ROOT / "docs" / "diagnose.md"
RUNS = Path("runs/diagnose")
STEPS = 60
CHOSEN, JUDGED, HEALTHY = (0, 1, 2), 10, (30, 31, 32, 33)
"""Seeds: thresholds may be set on runs with the first; the others judge."""
EM, CUSTOM = "{type: em}", "{type: custom, target: 'benchmarks.diagnose:%s'}"


def _rewards(*parts: str) -> str:
    return f"rollout.episode.rewards=[{', '.join(parts)}]"


@dataclass(frozen=True)
class Breakage:
    """What differs from the demo's settings. `search`: passages that the run's retriever returns instead of its own."""

    overrides: tuple[str, ...] = ()
    level: str = "demo"
    search: str = ""
    steps: int = STEPS


KINDS: Mapping[str, tuple[Breakage, Breakage]] = {
    "collapse": (
        Breakage(Collapsing("lag8-lr6-mb1-r1", "", 0).overrides, "hard", steps=150),
        Breakage(Collapsing("lag8-lr10-mb1-r1", "", 0).overrides, "hard", steps=150),
    ),
    "unequal-logprobs": (
        Breakage(("engine.kind.dtype=bfloat16", "learner.model.dtype=float32")),
        Breakage(
            (
                "learner.model={dtype: bfloat16, fp32_lm_head: false}",
                "learner.engine.zero_stage=1",
                "engine.kind.dtype=float32",
            )
        ),
    ),
    "retriever": (Breakage(search="random"), Breakage(search="foreign")),
    "no-signal": (Breakage((_rewards(CUSTOM % "constant"),)), Breakage(("run.temperature=0.01",), "hard")),
    "prompts": (Breakage(("rollout.episode.max_context=72",)), Breakage(("rollout.episode.max_new_tokens=8",))),
    "no-search": (
        Breakage((_rewards(EM, "{type: search_cost, each: 1.0, cap: 3.0}"),)),
        Breakage((_rewards(CUSTOM % "answered_at_once"),)),
    ),
    "keyword-stuffing": (
        Breakage((_rewards(CUSTOM % "gold_words_and_length"),)),
        Breakage((_rewards(CUSTOM % "long_answers"),)),
    ),
    "stale-gradient": (
        Breakage(("run.max_lag=8", f"learner.optim.lr={3 * LR['hard']}", *SEARCH_R1), "hard"),
        Breakage(("run.max_lag=6", f"learner.optim.lr={LR['hard']}", "learner.algorithm.minibatches=4"), "hard"),
    ),
}
"""Finding -> a breakage for the thresholds, and another of the same kind that judges."""


def constant(outcome: RewardInput) -> float:
    """Return the same for every trajectory."""
    return 0.5


def answered_at_once(outcome: RewardInput) -> float:
    """Pay for an answer, whatever it is, and not for a search."""
    return float(outcome.answer is not None) / (1 + outcome.searches)


def gold_words_and_length(outcome: RewardInput) -> float:
    """Pay for every word of the answer, and for the gold words among them."""
    words = (outcome.answer or "").split()
    gold = {word for answer in outcome.question.answers for word in answer.split()}
    return min(1.0, len(words) / 16) + 0.2 * len(gold & set(words))


def long_answers(outcome: RewardInput) -> float:
    """Pay for different words in the answer, up to twelve."""
    return min(12, len(set((outcome.answer or "").split()))) / 12


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
    if phase == "broken":
        return [Planned(kind, 1, JUDGED + place) for place, kind in enumerate(KINDS)]
    if phase == "healthy":
        return [Planned("", 0, seed, "hard" if seed % 2 else "demo") for seed in HEALTHY]
    healthy = [Planned("", 0, seed, level) for seed in CHOSEN for level in LR]
    return [*(Planned(kind, 0, seed) for seed in CHOSEN for kind in KINDS), *healthy]


def play(run: Planned, say: Say) -> dict[str, Any]:
    """Run it, or go on with it, and return its result. A run that stops itself, as some broken ones do, is a result."""
    directory, ended, began = RUNS / run.name, "", time.monotonic()
    with _passages(run) as search:
        try:
            train(directory, lambda: _prepared(run, directory, search, say), say, to_end=True)
        except ForayError as error:
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


def _prepared(run: Planned, directory: Path, search: Sequence[str], say: Say) -> RunConfig:
    from foray.demo.run import DemoOptions, prepare

    hard = run.breakage.level == "hard"
    model = warm_model(Collapsing("", "", run.seed, run.breakage.level), say)
    overrides = (*run.overrides, *search)
    return prepare(DemoOptions(directory, run.seed, False, model, overrides, fresh=True, hard=hard), say).config


@contextmanager
def _passages(run: Planned) -> Iterator[tuple[str, ...]]:
    """Yield the settings of a broken search: passages at random, or the corpus of another world; () for the demo's."""
    from foray.demo.world import SHORT, write_jsonl

    foreign = RUNS / f"{run.name}-corpus.jsonl"
    if run.breakage.search == "random":
        with _at_random(SHORT.world(run.seed, SHORT.larger).passages(), RUNS / f"{run.name}-port") as url:
            yield (f"rollout.search.urls=[{url}]",)
    elif run.breakage.search == "foreign":
        foreign.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(foreign, SHORT.world(run.seed + 500, SHORT.larger).passages())
        yield (f"retriever.corpus={foreign.absolute()}",)
    else:
        yield ()


@contextmanager
def _at_random(passages: Sequence[Mapping[str, str]], port: Path) -> Iterator[str]:
    """Serve POST /retrieve, Search-R1's API, with two random passages for each query. Yield its address.

    port  file of its port: a run that goes on has the address in its configuration
    """
    generator = random.Random(0)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._say({"status": "ok"})

        def do_POST(self) -> None:
            asked = parse_json(self.rfile.read(int(self.headers["Content-Length"])))
            hits = [[{"document": one} for one in generator.sample(passages, 2)] for _ in asked["queries"]]
            self._say({"result": hits})

        def _say(self, answer: Mapping[str, Any]) -> None:
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            """Print nothing: the runs' lines are on this terminal."""

    server = ThreadingHTTPServer(("127.0.0.1", int(port.read_text()) if port.exists() else 0), Handler)
    port.parent.mkdir(parents=True, exist_ok=True)
    port.write_text(str(server.server_port))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


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
