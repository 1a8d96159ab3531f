"""Export a checkpoint as a folder for transformers, peft and engines, without DeepSpeed or the run's ranks.

The export is the float32 state cast to the dtype of the run, so it equals the version published at that step. A
model with adapters is merged as for publishing: cast first, then the sum in float32, rounded once.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from learner.checkpoint.checkpoint import STATE, Checkpoints
from learner.config.model import LoraSettings, ModelSettings
from learner.engine.state import BUFFERS, FORMAT, INDEX
from learner.model.loading import load_causal
from learner.model.lora import ADAPTER, merge, scale_of
from learner.model.policy import PREFIX
from learner.model.tokenizer_check import TEXTS, make_auto_load_it
from learner.trainer.models import POLICY
from learner.weights.adapter import CONFIG, WEIGHTS, in_peft_names, peft_config
from protocol.errors import UserError
from protocol.runtime.files import fsync_path, fsync_tree
from protocol.runtime.progress import Progress, Say

log = logging.getLogger(__name__)

SHARD = "4GB"
OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
MASTER, EMA = "master", "ema"
Tensors = dict[str, torch.Tensor]


def find_state(where: Path, progress: Say = log.info) -> Path:
    """Return the policy's state in `where`: a run directory (its committed checkpoint, every file verified), or a
    checkpoint. `progress` prints a line, or shows bars.

    Raises UserError if there is none.
    """
    if (where / STATE / POLICY / INDEX).is_file():
        return where / STATE / POLICY
    checkpoint = Checkpoints(where / "checkpoints", keep=1).load(progress)
    if checkpoint is None or not (checkpoint.path / STATE / POLICY / INDEX).is_file():
        raise UserError(
            f"no checkpoint found in {where}",
            why="it contains neither a saved state nor a directory `checkpoints` with a committed one",
            todo="pass a run directory, or one of the directories in RUN_DIR/checkpoints",
        )
    return checkpoint.path / STATE / POLICY


def export_model(
    state: Path, model: Path, settings: ModelSettings, out: Path, *, average: bool = False, progress: Say = log.info
) -> None:
    """Write a Hugging Face folder to `out`, which must not exist: weights (safetensors), configuration, tokenizer.

    state     the policy's state in a checkpoint (`find_state`)
    model     the run's initial model; frozen weights, configuration and tokenizer come from there
    settings  of the run: dtype, and alpha of the adapters
    average   the moving average (`learner.reference`) instead of the policy itself
    progress  prints a line, or shows bars
    Raises UserError if the state is damaged, belongs to another model, or has no average.
    """
    _refuse_existing(out)
    tensors = _read(state, EMA if average else MASTER, settings, progress)
    causal = load_causal(model, settings.model_copy(update={"gradient_checkpointing": False, "attention": "eager"}))
    own = dict(causal.named_parameters())
    adapted = any(".lora_" in name for name in tensors)
    if not adapted and (missing := own.keys() - tensors.keys()):
        raise _another(state, model, f"{min(missing)} is missing")
    own |= dict(causal.named_buffers())
    with torch.no_grad():
        for name, tensor in _merged(tensors, own, settings.lora):
            if name not in own or own[name].shape != tensor.shape:
                raise _another(state, model, f"{name} has shape {list(tensor.shape)} in the checkpoint")
            own[name].copy_(tensor)

    progress(f"writing {out}")
    write_model(causal, model, settings.fixed_dtype, out)


def write_model(causal: Any, model: Path, dtype: str, out: Path, also: Mapping[str, str] | None = None) -> None:
    """Write transformers' model `causal` to `out`, which must not exist: it appears when it is complete.

    model  the folder that it was loaded from: configuration and tokenizer are copied
    dtype  of its weights, for the configuration
    also   further text files by name
    """
    _refuse_existing(out)

    def write(folder: Path) -> None:
        causal.save_pretrained(folder, max_shard_size=SHARD)
        for path in model.iterdir():
            if path.is_file() and not path.name.endswith(OTHER_WEIGHTS):
                shutil.copyfile(path, folder / path.name)
        # The original configuration: the model in memory has its dropout set to 0.
        config = json.loads((model / "config.json").read_text())
        config.pop("torch_dtype", None)
        (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype}, indent=2) + "\n")
        for name, text in (also or {}).items():
            (folder / name).write_text(text)
        if differ := make_auto_load_it(folder):
            log.warning("AutoTokenizer gives other ids than tokenizer.json for %d of %d texts", differ, TEXTS)

    _write_whole(out, write)


def export_adapter(
    state: Path, model: Path, settings: ModelSettings, out: Path, *, average: bool = False, progress: Say = log.info
) -> None:
    """Write only the adapters to `out`, in PEFT's layout, over `model`. Arguments and errors as in `export_model`."""
    _refuse_existing(out)
    tensors = _read(state, EMA if average else MASTER, settings, progress)
    named = {name.replace(f".{ADAPTER}.weight", ".weight"): t for name, t in tensors.items() if ".lora_" in name}
    if not named:
        raise UserError(f"the model in {state} has no adapters", todo="export it without --adapter")
    adapter = dict(in_peft_names(named.items()))

    def write(folder: Path) -> None:
        save_file(adapter, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(peft_config(adapter, settings.lora.alpha, model))

    _write_whole(out, write)


def _read(state: Path, key: str, settings: ModelSettings, progress: Say) -> Tensors:
    """Return transformers' name -> tensor in the run's dtype, without a value head."""
    index = _index(state)
    if key == EMA and not index["averages"]:
        raise UserError(
            f"the state in {state} has no moving average",
            why="only runs with learner.reference.kind ema or refresh keep one",
            todo="export the policy itself, without --ema",
        )
    files = sorted(set(index["files"][key].values()))
    found: Tensors = {}
    with Progress.of(progress).task("reading the state", len(index["shapes"]), "tensors") as task:
        for name, tensor in chain.from_iterable(_tensors(state / file) for file in files):
            if name.startswith(PREFIX):
                found[name] = tensor.to(getattr(torch, settings.fixed_dtype))
            task(len(found))
    found |= {name: tensor for name, tensor in _tensors(state / BUFFERS) if name.startswith(PREFIX)}
    missing = [name for name in index["shapes"] if name.startswith(PREFIX) and name not in found]
    if missing:
        raise _damaged(state, f"no file contains {missing[0]}")
    return {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}


def _index(state: Path) -> dict[str, Any]:
    try:
        index: dict[str, Any] = json.loads((state / INDEX).read_text())
    except (OSError, ValueError) as error:
        raise _damaged(state / INDEX, str(error)) from None
    if index.get("format") != FORMAT:
        raise _damaged(state / INDEX, f"its format is {index.get('format')}, but this version reads {FORMAT}")
    return index


def _tensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt", device="cpu") as shard:
            for name in shard.keys():  # noqa: SIM118  # not a mapping: it only has keys()
                yield name, shard.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise _damaged(path, str(error)) from None


def _another(state: Path, model: Path, why: str) -> UserError:
    todo = "pass the model that the run started with: --model DIR"
    return UserError(f"the state in {state} does not belong to the model {model}", why=why, todo=todo)


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path} is missing or damaged", why=why, todo="export an older checkpoint")


def _merged(tensors: Tensors, base: Tensors, lora: LoraSettings) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the state's own tensors and, for each adapter, the merged weight: the sum with the weight in `base`, or the
    tensor itself if there is none."""
    a_end, b_end = (f".lora_{half}.{ADAPTER}.weight" for half in "AB")
    for name, tensor in tensors.items():
        if name.endswith(a_end):
            module = name.removesuffix(a_end)
            if f"{module}.weight" in base:
                weight = merge(base[f"{module}.weight"], tensor, tensors[module + b_end], scale_of(lora))
                yield f"{module}.weight", weight
            else:
                yield name, tensor
        elif not name.endswith(b_end):
            yield name, tensor


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} already exists", todo="choose a directory that does not exist")


def _write_whole(out: Path, write: Callable[[Path], None]) -> None:
    """Create `out` atomically: complete or not at all."""
    part = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        part.mkdir(parents=True)
        write(part)
        for path in part.iterdir():
            # safetensors writes files for the owner only; apply the folder's umask to them
            path.chmod(part.stat().st_mode & 0o666)
        fsync_tree(part)
        part.rename(out)
        fsync_path(out.parent)
    except OSError as error:
        raise UserError(f"cannot write {out}", why=str(error), todo="check disk space and permissions") from None
    finally:
        shutil.rmtree(part, ignore_errors=True)
