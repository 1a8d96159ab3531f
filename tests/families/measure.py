"""What the learner makes of one model family: a tiny random model, beside transformers on each sequence alone."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import peft  # noqa: F401  # imported once, before the processes of the families fork
import torch
import transformers
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from learner.algorithms import build_algorithm
from learner.config.algorithm import GrpoSettings
from learner.config.learner import BatchSettings
from learner.config.model import LoraSettings, ModelSettings
from learner.data.batch import Batch, build_batch
from learner.data.packing import holds_several
from learner.model.loading import as_saved, load_policy
from learner.model.lora import merged, scale_of
from learner.model.policy import PolicyModel
from protocol.errors import UserError
from protocol.messages import Status, Trajectory, TrajectoryGroup
from protocol.versions import PolicyVersion
from rollout_server.cpu_engine.model.config import read_model_config
from tests.support.messages import make_question, observation_segment, policy_segment, prompt_segment

FAMILIES: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "families.yaml").read_text())
SGLANG = Path(__file__).parents[1] / "contracts" / "engine" / "test_engine_architectures.py"
EXACT, ROUNDING = 1e-4, 1e-3
"""Largest difference of log-probs in nats, and of a parameter's gradient relative to its largest element."""
CONTEXT = 70
"""Tokens of the longest trajectory."""
NOISIER = 1.5
"""How much larger than transformers' the mean error of bfloat16 may be."""
COLUMNS = {
    "one": "one trajectory per row",
    "packed": "packed rows",
    "shared": "shared prompts",
    "zero3": "ZeRO 3",
    "lora": "LoRA",
    "bf16": "bfloat16",
    "names": "published names",
    "embedded": "CPU engine",
    "sglang": "SGLang contract",
}
Cell = tuple[str, float | None, str]
"""Verdict (exact, yes, refused, FAIL, not tried), largest difference, reason."""


def configuration(name: str) -> Any:
    """The configuration of a family, without its quantisation."""
    given = FAMILIES["sizes"] | FAMILIES["families"][name]
    kind = given.pop("model_type", name)
    fixed = type(transformers.AutoConfig.for_model(kind))
    given.pop("quantization_config", None)
    return transformers.AutoConfig.for_model(
        kind, **{key: value for key, value in given.items() if not isinstance(getattr(fixed, key, None), property)}
    )


def write(name: str, directory: Path) -> Path:
    """A model with random weights, none of them 0 or 1."""
    torch.manual_seed(0)
    causal = AutoModelForCausalLM.from_config(configuration(name), attn_implementation="eager")
    with torch.no_grad():
        for parameter in causal.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    if quantised := FAMILIES["families"][name].get("quantization_config"):
        causal.config.quantization_config = quantised
    causal.save_pretrained(directory)
    return directory


@cache
def groups() -> list[TrajectoryGroup]:
    """Three groups of three trajectories, 12 to CONTEXT tokens, with one prompt per group."""
    rng = np.random.default_rng(0)

    def trajectory(prompt: Any, length: int) -> Trajectory:
        b, c, d = np.split(rng.integers(3, FAMILIES["sizes"]["vocab_size"], length), [length // 3, length // 2])
        segments = (prompt_segment(prompt), policy_segment(b), observation_segment(c), policy_segment(d))
        return Trajectory(status=Status.ANSWERED, segments=segments, reward=float(rng.random()))

    found = []
    for seq, lengths in enumerate(((8, 30, CONTEXT - 4), (9, 17, 40), (12, 12, 25)), 1):
        prompt = rng.integers(3, 128, 4)
        own = tuple(trajectory(prompt, n) for n in lengths)
        found.append(TrajectoryGroup(run="t", seq=seq, question=make_question(seq), trajectories=own))
    return found


def batch(row_tokens: int, *, share: bool = False) -> Batch:
    """The groups as a batch."""
    settings = BatchSettings(row_tokens=row_tokens, micro_batch_tokens=300, share_prompts=share)
    given: dict[str, Any] = {"now_step": 0, "lineage": (PolicyVersion(1, 0),), "max_lag": 0, "temperature": 0.8}
    return build_batch(groups(), build_algorithm(GrpoSettings()), settings=settings, **given)


Scores = tuple[torch.Tensor, dict[str, torch.Tensor]]
"""Log-probs of the trained tokens in order, and the gradient of their weighted sum by parameter."""


def by_learner(model: PolicyModel, batch: Batch) -> Scores:
    """As a training step computes them."""
    model.train().zero_grad()
    found: dict[tuple[int, int], float] = {}
    for m in batch.micro_batches:
        t = {name: torch.from_numpy(getattr(m, name)) for name in m.__dataclass_fields__}
        documents = t["document_ids"] if holds_several(m.document_ids, m.positions) else None
        scores = model(t["ids"], t["positions"], documents, t["index"], t["targets"], batch.temperature, False)
        if scores.logprobs.requires_grad:
            (scores.logprobs * t["advantages"]).sum().backward()
        keys = zip(m.trajectory.tolist(), m.positions.flat[m.index].tolist(), strict=True)
        found.update(zip(keys, scores.logprobs.tolist(), strict=True))
    gradients = {n.removeprefix("causal."): p.grad for n, p in model.named_parameters() if p.grad is not None}
    return torch.tensor([found[key] for key in sorted(found)], dtype=torch.float64), gradients


def by_transformers(causal: Any, *, backward: bool = True) -> Scores:
    """Each trajectory alone, with eager attention."""
    whole = batch(0)
    advantage = {int(i): float(a) for m in whole.micro_batches for i, a in zip(m.trajectory, m.advantages, strict=True)}
    causal.eval().zero_grad()
    found: list[float] = []
    for number, t in enumerate(t for g in groups() for t in g.trajectories):
        logits = causal(torch.tensor(t.ids.tolist())[None], use_cache=False).logits[0].double() / whole.temperature
        at = torch.from_numpy(np.flatnonzero(t.mask))
        chosen = torch.log_softmax(logits, -1)[at - 1, torch.tensor(t.ids.tolist())[at]]
        if backward:
            (chosen.sum() * advantage[number]).backward()
        found += chosen.tolist()
    gradients = {n: p.grad.clone() for n, p in causal.named_parameters() if p.grad is not None}
    return torch.tensor(found, dtype=torch.float64), gradients


def compared(found: Scores, expected: Scores) -> Cell:
    """Whether log-probs and every gradient agree; the difference is that of the log-probs."""
    assert float(expected[0].std()) > 0.1, "there is something to compare"
    wrong = float((found[0] - expected[0]).abs().max())
    if not wrong <= EXACT:
        return "FAIL", wrong, f"log-probs differ by {wrong:.2g} nats"
    floor = 1e-3 * max((float(g.abs().max()) for g in expected[1].values()), default=0.0)
    for name, gradient in expected[1].items():
        own = found[1].get(name, torch.zeros_like(gradient))
        ratio = float((own - gradient).abs().max()) / max(float(gradient.abs().max()), floor)
        if not ratio <= ROUNDING:
            return "FAIL", ratio, f"the gradient of {name} differs by {ratio:.2g}"
    return "exact", wrong, ""


def tried(measure: Callable[[], Cell]) -> Cell:
    """What `measure` finds; a UserError is a refusal, anything else a failure."""
    try:
        return measure()
    except UserError as error:
        why = error.why or error.what
        return "refused", None, "" if why.startswith("model type") else why
    except Exception as error:
        return "FAIL", None, f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"


def measured(name: str, directory: Path) -> dict[str, Any]:
    """The row of a family: its type, its attention and a cell for each of COLUMNS."""
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    write(name, directory)
    kind = configuration(name).model_type
    attention = "sdpa"
    try:
        load_policy(directory, ModelSettings(), packed=False)
    except UserError as error:
        attention = "eager" if "attention to eager" in error.todo else attention
    settings = ModelSettings(attention=attention)  # type: ignore[arg-type]
    cells: dict[str, Cell] = {}

    def trained(*, packed: bool, shared: bool = False) -> Cell:
        policy = load_policy(directory, settings, packed=packed, shared=shared)
        return compared(by_learner(policy, batch(150 if packed else 0, share=shared)), expected)

    if "quantization_config" not in FAMILIES["families"][name]:
        plain = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
        expected = by_transformers(plain)
    cells["one"] = tried(lambda: trained(packed=False))
    if cells["one"][0] == "exact":
        cells["packed"] = tried(lambda: trained(packed=True))
        cells["shared"] = tried(lambda: trained(packed=True, shared=True))
        packed = cells["packed"][0] == "exact"
        cells["zero3"] = tried(lambda: sharded(directory, settings, packed=packed))
        cells["lora"] = tried(lambda: adapted(directory, settings, packed=packed, plain=plain))
        cells["bf16"] = tried(lambda: rounded(directory, settings, expected[0], packed=packed))
        cells["names"] = tried(lambda: published(directory, settings))
    else:
        cells |= dict.fromkeys(("packed", "shared", "zero3", "lora", "bf16", "names"), cells["one"])
    cells["embedded"] = tried(lambda: embedded(directory))
    here = f'\n    "{kind}": {{' in SGLANG.read_text()
    cells["sglang"] = ("yes", None, "") if here else ("not tried", None, "")
    return {"type": kind, "attention": attention, "cells": {column: cells[column] for column in COLUMNS}}


def sharded(directory: Path, settings: ModelSettings, *, packed: bool) -> Cell:
    """Every parameter and buffer read from the files as transformers loads it, in both dtypes."""
    whole = False
    for dtype in ("float32", "bfloat16"):
        given = settings.model_copy(update={"dtype": dtype})
        loaded, read = (load_policy(directory, given, packed=packed, sharded=at).causal for at in (False, True))
        if read.stored is None:
            whole = True
            continue
        expected = dict(loaded.named_parameters()) | dict(loaded.named_buffers())
        for parameter in read.parameters():
            if read.stored.holds(parameter):
                there = torch.full(parameter.shape, float("nan"), dtype=parameter.dtype)
                read.stored.read(parameter, there, 0, there.numel())
                parameter.data = there
        own = dict(read.named_parameters()) | dict(read.named_buffers())
        for name, tensor in expected.items():
            if own[name].dtype != tensor.dtype:
                return "FAIL", None, f"{name} is {own[name].dtype} instead of {tensor.dtype}"
            if not torch.equal(own[name], tensor):
                return "FAIL", float((own[name] - tensor).abs().max()), f"{name} differs"
    return "exact", None if whole else 0.0, "loaded whole on every rank" if whole else ""


def adapted(directory: Path, settings: ModelSettings, *, packed: bool, plain: Any) -> Cell:
    """Adapters, trained and published merged: the engine's model scores as the learner's."""
    lora = LoraSettings(rank=4, alpha=8.0)
    policy = load_policy(directory, settings.model_copy(update={"lora": lora}), packed=packed)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in policy.causal.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.1)
    scores, gradients = by_learner(policy, batch(150 if packed else 0))
    assert gradients and all(".lora_" in name for name in gradients), "only adapters are trained"
    weights = dict(merged(((n, p.detach()) for n, p in policy.causal.named_parameters()), scale_of(lora)))
    before = {n: p.detach().clone() for n, p in plain.named_parameters()}
    unknown = plain.load_state_dict(weights, strict=False).unexpected_keys
    moved, _ = by_transformers(plain, backward=False)
    plain.load_state_dict(before, strict=False)
    if unknown:
        return "FAIL", None, f"{unknown[0]} is no parameter of the model"
    return compared((scores, {}), (moved, {}))


def rounded(directory: Path, settings: ModelSettings, expected: torch.Tensor, *, packed: bool) -> Cell:
    """The mean error of bfloat16 against float32, relative to that of transformers in bfloat16."""
    policy = load_policy(directory, settings.model_copy(update={"dtype": "bfloat16"}), packed=packed)
    scores, gradients = by_learner(policy, batch(150 if packed else 0))
    given: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "eager"}
    plain = AutoModelForCausalLM.from_pretrained(directory, **given)
    theirs = float((by_transformers(plain, backward=False)[0] - expected).abs().mean())
    ratio = float((scores - expected).abs().mean()) / theirs
    if not all(bool(g.isfinite().all()) for g in gradients.values()):
        return "FAIL", None, "a gradient is not finite"
    if not ratio <= NOISIER:
        return "FAIL", ratio, f"log-probs err {ratio:.2g} times as much as those of transformers in bfloat16"
    return "exact", ratio, ""


def published(directory: Path, settings: ModelSettings) -> Cell:
    """Published tensors have the names, shapes and values of the files."""
    causal = load_policy(directory, settings, packed=False).causal
    files = dict(pair for path in directory.glob("*.safetensors") for pair in load_file(path).items())
    weights: Iterable[tuple[str, torch.Tensor]] = [
        *((n, p.detach()) for n, p in causal.named_parameters()),
        *((n, b) for n, b in causal.named_buffers() if n in causal.state_dict()),
    ]
    sent = dict(as_saved(causal, weights))
    if missing := sorted(files.keys() - sent.keys()):
        return "FAIL", None, f"{missing[0]} is not published"
    if extra := sorted(sent.keys() - files.keys()):
        return "FAIL", None, f"{extra[0]} is not in the files"
    wrong = max(float((files[name] - tensor).abs().max()) for name, tensor in sent.items())
    return ("exact", 0.0, "") if wrong == 0 else ("FAIL", wrong, "a published tensor differs from the files")


def embedded(directory: Path) -> Cell:
    """Whether the CPU engine takes the configuration."""
    read_model_config(directory)
    return "yes", None, ""
