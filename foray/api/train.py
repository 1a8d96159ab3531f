"""`foray.train_grpo`: start a run, as separate processes, from Python objects."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.hardware.inventory import CPU, this_machine
from foray.api.callables import CallableServer, RewardFunction, SearchEngine
from foray.api.inputs import Example, reward_setting, save_model, search_overrides, server_of, write_dataset
from foray.api.run import LOG, Run
from foray.api.searcher import Searcher
from protocol.errors import UserError
from protocol.runtime.config import override

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

PRESET, CPU_GROUPS = "search_r1_grpo", 8


def train_grpo(
    model: str | Path | PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dataset: str | Path | Iterable[Example] = (),
    search_engine: str | Path | Searcher | SearchEngine | None = None,
    *,
    reward: str | RewardFunction = "em",
    epochs: float = 1.0,
    lr: float | None = None,
    group_size: int | None = None,
    run_dir: str | Path | None = None,
    preset: str = PRESET,
    hardware: str = "",
    overrides: Sequence[str] = (),
    detach: bool = False,
) -> Run:
    """Train `model` to answer the questions of `dataset` with a search engine, by GRPO, and return the run at once.

    model          folder in Hugging Face layout, or a model from `from_pretrained`, which is saved with `tokenizer`
    dataset        file of questions in any format of docs/data.md, or examples
    search_engine  `foray.Searcher`, an index or corpus, the URL of a retriever, or an object with `search(query)`,
                   which is called in this process; None: without search results
    reward         name of a reward type (docs/rewards.md), or a function of this process: RewardInput -> float
    epochs         passes over the dataset; the number of steps follows
    lr             learning rate; None: the preset's
    group_size     trajectories of each question; None: the preset's
    run_dir        directory of the run; an existing one is resumed. None: a new one in runs/
    preset         recipe that gives all other settings (docs/presets.md); `algorithm` and others are overrides
    hardware       profile of docs/hardware.md; "": the CPU, if this machine has no GPU
    overrides      settings, e.g. ["run.max_lag=0", "learner.algorithm.type=rloo"]
    detach         go on when this process ends. Groups that need its functions are then rejected with their cause

    `run.wait()` shows the progress, `run.result()` waits and returns the trained model. Raises UserError.
    """
    from deploy.run.run_dir import unique_id

    directory = Path(run_dir) if run_dir is not None else Path("runs") / unique_id("notebook")
    inputs = directory.absolute() / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    questions, count = write_dataset(dataset, inputs)
    given = [
        override("run.dir", directory.absolute()),
        override("run.id", directory.name),
        override("run.model", save_model(model, tokenizer, inputs)),
        override("learner.questions", questions),
    ]
    if lr is not None:
        given.append(f"learner.optim.lr={lr!r}")
    if group_size is not None:
        given.append(f"run.group_size={group_size}")
    server = server_of(search_engine, reward)
    try:
        given += search_overrides(search_engine, server)
        given += [f"rollout.episode.rewards={json.dumps([reward_setting(reward, server)])}"]
        file = _write(directory, preset, hardware or _hardware(), [*given, *_steps(epochs, count), *overrides])
        return _start(file, directory, server, detach=detach)
    except BaseException:
        if server is not None:
            server.close()
        raise


def _steps(epochs: float, count: int) -> list[str]:
    groups = min(CPU_GROUPS, count)
    return [f"run.groups_per_step={groups}", f"run.steps={max(1, math.ceil(epochs * count / groups))}"]


def _hardware() -> str:
    if not this_machine(os.environ):
        return CPU
    raise UserError("this machine has GPUs", todo='name its profile of docs/hardware.md, e.g. hardware="8xh100"')


def _write(directory: Path, preset: str, hardware: str, overrides: Sequence[str]) -> Path:
    """Write the configuration as `foray init --hardware` does."""
    from deploy.config import from_tree
    from deploy.hardware.profiles import document, resolve
    from deploy.hardware.run import built_index
    from foray.commands.init import PRESETS
    from protocol.runtime.config import read_tree
    from protocol.runtime.number_format import read_facts

    recipe = PRESETS / f"{preset}.yaml"
    if not recipe.is_file():
        raise UserError(f"there is no preset {preset!r}", todo="docs/presets.md lists them")
    tree = read_tree(recipe, overrides)
    config = from_tree(tree)
    found = resolve(tree, hardware, read_facts(config.run.model), built_index(config))
    file = directory / "run.yaml"
    file.write_text(document(found, f"foray.train_grpo: preset {preset} for {hardware}"), encoding="utf-8")
    return file


def _start(file: Path, directory: Path, server: CallableServer | None, *, detach: bool) -> Run:
    words = [sys.executable, "-m", "foray", "up", str(file), *([] if detach else ["--until-stdin-ends"])]
    with (directory / LOG).open("ab") as log:
        process = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL if detach else subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C in the notebook interrupts a wait, not the run
        )
    return Run(directory, process, server)
