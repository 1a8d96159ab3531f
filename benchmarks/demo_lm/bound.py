"""What limits a demo: its policies with a retriever that finds what there is, and supervised training on everything.

    python -m benchmarks.demo_lm.bound RUN        a finished demo, e.g. runs/demo-lm-0

The warm start, GRPO and a policy of supervised training on all training questions answer the demo's questions three
times: as in the demo; from a corpus of the supporting passages only, so that a search finds them; and so with
observations that are not cut. What GRPO gains by better searches ends near the second, and near the third if cuts hide
answers. Writes RUN/bound.json; docs/recipes.md shows those in docs/figures/recipes/bound/. A finished part is not
repeated. Where time is short, --policies and --retrievers name some: "everything" needs of the demo only its questions,
its index and its model.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.base import machine_facts
from benchmarks.demo_lm.command import CONFIG_COPY, EVALUATED, FACTS, MOST_THREADS
from benchmarks.demo_lm.phases import Phase, phases_exit_code, read_phases, run_phases
from benchmarks.demo_lm.results import policy_result, read_episodes
from deploy.hardware.run import cores
from foray.data.files import write_questions
from foray.evaluation.store import is_result
from learner.data.questions import load_questions
from protocol.errors import UserError
from protocol.runtime.config import override, read_tree
from protocol.runtime.files import atomic_write
from retriever.corpus.corpus import open_corpus, parse_line
from retriever.corpus.manifest import corpus_of

RESULT, FOLDER = "bound.json", "bound"
UNCUT = ("rollout.episode.max_obs_tokens=768", "rollout.episode.max_context=2048")
"""99 of 100 passages of the larger data have at most 573 tokens, half of them 120."""
EPOCHS = 1
"""Passes over the demonstrations of all training questions: about 250 updates, an hour of two cores."""
EVERYTHING = "everything"
POLICIES = {"warm start": "warm", "GRPO": "grpo", "supervised on everything": EVERYTHING}
RETRIEVERS = {"as in the demo": "demo", "finds": "finds", "finds, uncut": "uncut"}
"""Words of the table -> part of a result's name."""


def measure(
    directory: Path, names: Sequence[str], kinds: Sequence[str], epochs: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """Run what is not finished of these policies, and return the means of each with each of these retrievers.

    Raises UserError if the demo has not evaluated one of them, PhaseFailed or PhaseStopped.
    """
    facts, done = _facts(directory), read_phases(directory)
    evaluated = [name for name in POLICIES.values() if done.get(f"eval-{name}", {}).get("done")]
    if not {*names} - {EVERYTHING} <= {*evaluated}:
        raise UserError(f"{directory} is not a finished demo", todo="run the same foray demo-lm again")
    bound, limit = directory / FOLDER, facts["sizes"]["limit"]
    if evaluated:  # the demo may have had a smaller --limit
        answered = {(row["data_set"], row["question_id"]) for row in read_episodes(directory / "eval" / evaluated[0])}
        limit = max(Counter(data_set for data_set, _ in answered).values())
    run_phases(_phases(directory, bound, names, kinds, limit, epochs), bound, say)
    minutes = sum(one["seconds"] for one in read_phases(bound).values()) / 60
    policies = [policy for policy, name in POLICIES.items() if name in names]
    retrievers = [retriever for retriever, kind in RETRIEVERS.items() if kind in kinds]
    return {
        "seed": facts["seed"],
        "epochs": epochs,
        "rows": [row for policy in policies for retriever in retrievers for row in _rows(directory, policy, retriever)],
        "minutes": round(minutes, 1),
        "machine": machine_facts(),
    }


def _rows(directory: Path, policy: str, retriever: str) -> list[dict[str, Any]]:
    """Return F1, searches and the share of supporting passages that were read: a row for each set of questions."""
    name, kind = POLICIES[policy], RETRIEVERS[retriever]
    in_demo = directory / "eval" / name
    where = in_demo if kind == "demo" and is_result(in_demo) else directory / FOLDER / "eval" / f"{name}-{kind}"
    result = policy_result(policy, read_episodes(where))
    rows = []
    for data_set in EVALUATED:
        read = [row["rewards"]["retrieval_hit"] for row in result.rows if row["data_set"] == data_set]
        means = {column: round(result.mean(column, data_set).mean, 4) for column in ("f1", "searches")}
        f1 = {end: round(getattr(result.mean("f1", data_set), end), 4) for end in ("low", "high")}
        rows.append({"policy": policy, "retriever": retriever, "data_set": data_set, "n": len(read)} | means | f1)
        rows[-1]["read"] = round(fmean(read), 4)
    return rows


def _facts(directory: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((directory / FACTS).read_text())
    except FileNotFoundError:
        raise UserError(f"{directory} is not a demo", todo="name the directory of a foray demo-lm") from None
    return found


def _phases(
    directory: Path, bound: Path, names: Sequence[str], kinds: Sequence[str], limit: int, epochs: int
) -> list[Phase]:
    """Return the phases: the demo's policies, then supervised training on all training questions and its policy."""
    config, questions = directory / CONFIG_COPY, directory / "questions"
    asked = {name: load_questions(questions / f"{name}.jsonl").questions for name in (*EVALUATED, "shown", "train")}
    retriever = read_tree(config, [])["retriever"]
    corpus = corpus_of(Path(retriever["index_dir"]), Path(retriever["corpus"]))
    supporting = {passage for name in EVALUATED for question in asked[name] for passage in question.supporting}
    _write_found(corpus, bound / "corpus.jsonl", supporting)
    write_questions(bound / "everything.jsonl", [*asked["shown"], *asked["train"]])
    threads = min(cores(), MOST_THREADS)
    suites = [f"{name}={questions / name}.jsonl" for name in EVALUATED]
    finds = (override("retriever.corpus", bound / "corpus.jsonl"), override("retriever.index_dir", bound / "index"))
    settings = {"demo": (), "finds": finds, "uncut": (*finds, *UNCUT)}
    policies = {"warm": directory / "warm", "grpo": directory / "grpo", EVERYTHING: bound / "warm"}

    def evaluation(name: str, kind: str) -> Phase:
        out, alone = bound / "eval" / f"{name}-{kind}", f"engine.kind.threads={threads}"
        words = ("--suite", *suites, "--limit", limit, "--out", out, "--resume", alone, *settings[kind])
        title = f"evaluate {name}, retriever: {kind}"
        return Phase.foray(f"eval-{name}-{kind}", title, "eval", policies[name], "--config", config, *map(str, words))

    demos, model = bound / "demonstrations.jsonl", _model(directory)
    of_demo = [evaluation(name, kind) for kind in kinds if kind != "demo" for name in names if name != EVERYTHING]
    if EVERYTHING not in names:
        return of_demo
    return [
        *of_demo,
        Phase.foray(
            "demonstrate",
            "demonstrations from all training questions",
            "data",
            "demonstrate",
            bound / "everything.jsonl",
            "--config",
            config,
            "--out",
            demos,
            "--searches",
            "2",
        ),
        Phase.foray(
            "sft",
            "supervised training on everything",
            "sft",
            demos,
            "--model",
            model,
            "--out",
            bound / "warm",
            "--config",
            config,
            f"learner.engine.threads={threads}",
            f"sft.epochs={epochs}",
            "sft.max_steps=0",
        ),
        *(evaluation(EVERYTHING, kind) for kind in kinds),
    ]


def _model(directory: Path) -> Path:
    own = directory / "model"
    return own if own.is_dir() else Path(_facts(directory)["model"])


def _write_found(corpus: Path, path: Path, names: set[str]) -> None:
    """Write the passages with these ids or titles."""
    with open_corpus(corpus).open("rb") as file:
        kept = [line for line in file if line.strip() and {(p := parse_line(line)).id, p.title} & names]
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, b"".join(kept), durable=False)


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the results as a Markdown table."""
    if not results:
        return "Not run yet."
    header = ("seed", "policy", "retriever", "questions", "F1", "searches", "supporting passages read")
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for result in results:
        for row in result["rows"]:
            cells = [str(result["seed"]), *(row[name] for name in ("policy", "retriever", "data_set"))]
            cells += [f"{row['f1']:.3f} ({row['low']:.2f} to {row['high']:.2f})"]
            cells += [f"{row['searches']:.2f}", f"{row['read']:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure one demo, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.demo_lm.bound", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("run", type=Path, help="directory of a finished demo")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"of supervised training (default: {EPOCHS})")
    names = list(POLICIES.values())
    parser.add_argument("--policies", nargs="+", choices=names, default=names, help="(default: all)")
    kinds = list(RETRIEVERS.values())
    parser.add_argument("--retrievers", nargs="+", choices=kinds, default=kinds, help="(default: all)")
    args = parser.parse_args(argv)

    def say(line: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {line}", flush=True)

    directory = args.run.absolute()
    result = measure(directory, args.policies, args.retrievers, args.epochs, say)
    atomic_write(directory / RESULT, (json.dumps(result) + "\n").encode(), durable=True)
    print(table([result]))
    return 0


if __name__ == "__main__":
    sys.exit(phases_exit_code(main))
