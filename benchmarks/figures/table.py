"""The figures of `docs/benchmarks.md`: the command that makes each, and its file.

`docs/figures/NAME.json` is the report of the command, with machine, date, code version and targets. A figure is stale
if the hash of the code that it measures differs from the one in its file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import BENCHMARKS
from benchmarks.base import Target
from benchmarks.report import ROOT, digest
from foray.demo.compare import GOAL, VARIANTS, read_variants

FOLDER = ROOT / "docs" / "figures"
RUNS = Path("runs/figures")
"""Relative to the repository's root: run directories, raw output, and the warm start shared by several figures."""
MODEL = RUNS / "warm" / "model"
SEEDS = (0, 1, 2, 3, 4)
AGENT = (
    *("rollout.agent.type=python", "rollout.agent.target=examples.agents.plain_agent:agent"),
    "rollout.agent.gateway_search=true",
)
"""An agent in plain code in place of the built-in loop."""
AGENT_SEEDS = (0, 1)
RING = ("protocol", "rollout_server", "learner", "retriever", "foray/demo")
NEEDS_GPU = ("retriever_gpu", "transfer", "learner-gpu", "demo-gpu")
"""`make gpu-check` makes these."""
NEEDS_BFLOAT16 = ("small_lm",)
"""Made only where the CPU computes faster in bfloat16: on others it takes hours, and says nothing."""

FLAGS: dict[str, tuple[str, ...]] = {
    "async": ("--model", str(MODEL), "--dir", str(RUNS / "async")),
    "dashboard": ("--model", str(MODEL)),
    "retriever": ("--passages", "500000"),
    "transport": ("--minutes", "0.5"),
    "weights": ("--rounds", "9"),
}
"""Flags of a benchmark in addition to --json."""
GPU_LEARNER = (
    *("--shape", "1.5b", "--dtype", "bfloat16", "--vocabulary", "151936", "--groups", "8", "--turn-tokens", "192"),
    *("--observation-tokens", "512", "--longest", "2048", "--row-tokens", "4096", "--micro-batch-tokens", "4096"),
    *("--logit-chunk-mb", "1024", "--only", "padded"),
)
"""Qwen2.5-1.5B in bfloat16. With trajectories of 4096 tokens the padded loop ran out of the 80 GB of an H100."""
ENGINE_135M = (
    *("--shape", "135m", "--dtype", "auto", "--concurrency", "16", "--prompt-tokens", "256", "--new-tokens", "64"),
    *("--rounds", "3"),
)
"""SmolLM2-135M, with the lengths of `foray demo-lm`."""
VARIATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "retriever-fast-index": ("retriever", ("--passages", "20000", "--indexes", "")),
    "packing-small-batch": ("packing", ("--groups", "4")),
    "learner-gpu": ("learner", GPU_LEARNER),
    "learner-signs": ("learner", ("--only", "unmeasured,preserve", "--rounds", "15")),
    "engine-135m": ("engine", ENGINE_135M),
}
"""Figure -> a benchmark with other flags."""
HARD = (Target("em_after", 0.6, "exact match on questions about a world never trained on"),)
"""Targets of the hard demo."""
TARGETS = {
    "learner-gpu": (Target("ours.mfu", 0.4, "share of the GPU's own rate of matrix products"),),
    "engine-135m": (Target("ratio", 2.0, "tokens a second, streaming, over transformers' generate"),),
}
"""Targets of a figure, in addition to those of its benchmark or in place of those of the same name."""
MEASURED = {
    "learner": ("ratio", "ratio_trl"),
    "learner-gpu": ("ratio", "ours.mfu"),
    "learner-signs": ("kept_with_signs", "kept_with_preserve"),
}
"""Figure -> those of its targets that its flags measure; all if absent."""


@dataclass(frozen=True)
class Figure:
    """One file of FOLDER.

    argv     arguments of `foray`; prints one JSON object
    warm     whether it needs MODEL
    part_of  name of this figure in a report of several; "": the figure is the report
    minutes  time limit
    """

    name: str
    argv: tuple[str, ...]
    modules: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    warm: bool = False
    part_of: str = ""
    minutes: float = 30

    @property
    def command(self) -> str:
        """Return the command as typed."""
        return " ".join(("foray", *(word or "''" for word in self.argv)))

    @property
    def path(self) -> Path:
        """Return its file."""
        return FOLDER / f"{self.name}.json"


def figures() -> dict[str, Figure]:
    """Return all figures by name, in the order in which they are made."""
    benches = {name: (name, FLAGS.get(name, ())) for name in BENCHMARKS} | VARIATIONS
    found = [_bench(name, kind, flags) for name, (kind, flags) in benches.items()]
    found += [_demo(f"demo-{seed}", "--seed", str(seed)) for seed in SEEDS]
    found += [_demo(f"demo-agent-{seed}", "--seed", str(seed), overrides=AGENT) for seed in AGENT_SEEDS]
    found += [_demo("demo-gpu", "--seed", "0")]
    found += [_demo("demo-control", "--seed", "0", "--control", "shuffled-reward")]
    found += [_demo(f"demo-hard-{seed}", "--hard", "--seed", str(seed), targets=HARD, minutes=60) for seed in SEEDS]
    found += [_demo("demo-hard-control", "--hard", "--seed", "0", "--control", "shuffled-reward", minutes=60)]
    found += [_variant(name) for name in read_variants(VARIANTS, [])]
    return {figure.name: figure for figure in found}


def _bench(name: str, kind: str, flags: tuple[str, ...]) -> Figure:
    bench = BENCHMARKS[kind]
    targets = {target.path: target for target in (*bench.targets, *TARGETS.get(name, ()))}
    argv = ("bench", kind, "--json", *flags)
    measured = tuple(targets[path] for path in MEASURED.get(name, targets))
    return Figure(name, argv, bench.modules, measured, warm=str(MODEL) in flags)


def _demo(
    name: str,
    *flags: str,
    targets: tuple[Target, ...] = (),
    minutes: float = 15,
    overrides: tuple[str, ...] = (),
) -> Figure:
    argv = ("demo", *flags, "--json", "--fresh", "--dir", str(RUNS / name), *overrides)
    return Figure(name, argv, RING, targets, minutes=minutes)


def _variant(name: str) -> Figure:
    flags = ("--set", "run.steps=120", "--json", "--fresh", "--dir", str(RUNS / "compare"), "--model", str(MODEL))
    # not measured in training: DAPO trains only on groups with different rewards
    reached = Target("held_out_after", GOAL, "exact match on questions about a world never trained on")
    # the control must not learn
    targets = () if name == "control" else (reached,)
    return Figure(f"compare-{name}", ("compare", "--only", name, *flags), RING, targets, warm=True, part_of=name)


def read(figure: Figure, folder: Path = FOLDER) -> dict[str, Any] | None:
    """Return the measured report, None if there is none."""
    path = folder / figure.path.name
    if not path.exists():
        return None
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def stale(figure: Figure, kept: Mapping[str, Any], hashes: dict[tuple[str, ...], str] | None = None) -> bool:
    """Return whether the measured code or the command has changed. `hashes` caches the present hashes."""
    hashes = {} if hashes is None else hashes
    if figure.modules not in hashes:
        hashes[figure.modules] = digest(figure.modules)
    return bool(kept["modules"]["hash"] != hashes[figure.modules] or kept["command"] != figure.command)
