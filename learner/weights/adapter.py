"""LoRA parameters as files: `weights/v{epoch}.{step}/` in PEFT's layout, which engines load beside their weights.

Some MB instead of all, and no engine pauses: requests name the adapter they want, and those in flight go on with
theirs. What is published is the whole difference to the run's initial model, which is what the engines must hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from learner.config.learner import AdapterPublishSettings
from learner.weights.base import EngineLink
from learner.weights.disk import DiskPublisher, Tensors
from protocol.errors import UserError
from protocol.messages import Transport, WeightUpdate
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
"""What PEFT puts before the names of transformers."""
_NAME = re.compile(r"(?P<module>.+\.(?P<kind>\w+))\.lora_(?P<half>[AB])(?:\.default)?\.weight")


class AdapterPublisher(DiskPublisher):
    """Takes LoRA parameters only, with transformers' names or PEFT's: `{module}.lora_A.weight` is [rank, in],
    `{module}.lora_B.weight` [out, rank]. All ranks are equal.
    """

    transport: Transport = "adapter"
    weights_file = WEIGHTS

    def __init__(
        self, settings: AdapterPublishSettings, run: RunSettings, model_files: Sequence[Path], link: EngineLink
    ) -> None:
        super().__init__(settings, run, (), link)  # an adapter travels without the model's files
        self._alpha, self._model = settings.alpha, run.model

    def publish(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """As of the base. Raises UserError for a tensor that is no LoRA parameter."""
        return super().publish(version, in_peft_names(weights))

    def _described(self, tensors: Tensors) -> dict[str, str]:
        return {CONFIG: peft_config(tensors, self._alpha, self._model)}


def peft_config(tensors: Tensors, alpha: float, model: Path) -> str:
    """Return the text of CONFIG for an adapter of `model` with these tensors. Raises UserError unless all are of one
    rank."""
    ranks = {tensor.shape[0 if ".lora_A." in name else 1] for name, tensor in tensors.items()}
    if len(ranks) != 1:
        raise UserError(f"the adapter has ranks {sorted(ranks)}", todo="give all its parts one rank")
    kinds = {found["kind"] for name in tensors if (found := _NAME.fullmatch(name))}
    (rank,) = ranks
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(kinds),
        "inference_mode": True,
    }
    return json.dumps(config, indent=1)


def in_peft_names(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """LoRA parameters under the names of a PEFT file. Raises UserError for any other tensor."""
    for name, tensor in weights:
        found = _NAME.fullmatch(name)
        if found is None:
            raise UserError(
                f"learner.publish.type is adapter, and {name!r} is no LoRA parameter",
                why="an adapter holds nothing else: the model's own weights are not published",
                todo="train LoRA parameters only, or set learner.publish.type to disk or distributed",
            )
        yield f"{PREFIX}{found['module'].removeprefix(PREFIX)}.lora_{found['half']}.weight", tensor
