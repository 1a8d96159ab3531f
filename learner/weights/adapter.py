"""LoRA parameters as files: `weights/v{epoch}.{step}/` in PEFT's layout, which engines load in addition to their
weights.

Some MB instead of all weights, and no engine pauses: each request names its adapter, and running requests keep theirs.
The adapter is the whole difference to the run's initial model, which the engines must have loaded.
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
"""PEFT's prefix of transformers' names."""
_NAME = re.compile(
    r"(?P<module>(?:.+\.)?(?P<kind>\w+\.[^\W\d]\w*(?:\.\d+)*))\.lora_(?P<half>[AB])(?:\.default)?\.weight"
)


class AdapterPublisher(DiskPublisher):
    """Publishes LoRA parameters only, with transformers' or PEFT's names: `{module}.lora_A.weight` is [rank, in],
    `{module}.lora_B.weight` [out, rank]. All adapters have the same rank.
    """

    transport: Transport = "adapter"
    weights_file = WEIGHTS

    def __init__(
        self,
        settings: AdapterPublishSettings,
        run: RunSettings,
        model_files: Sequence[Path],
        link: EngineLink,
        *,
        alpha: float,
    ) -> None:
        super().__init__(settings, run, (), link)  # an adapter is published without the model's files
        self._alpha = alpha

    def publish(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate:
        """Publish as the base class does. Raises UserError for a tensor that is not a LoRA parameter."""
        return super().publish(version, in_peft_names(weights))

    def initial(self, version: PolicyVersion, weights: Iterable[tuple[str, torch.Tensor]]) -> WeightUpdate | None:
        """Return None: engines need the first adapter, whose name requests must state."""
        for _ in weights:
            pass
        return None

    def _described(self, tensors: Tensors) -> dict[str, str]:
        return {CONFIG: peft_config(tensors, self._alpha, self._model)}


def peft_config(tensors: Tensors, alpha: float, model: Path) -> str:
    """Return the text of CONFIG for an adapter of `model` with these tensors. Raises UserError if ranks differ."""
    ranks = {tensor.shape[0 if ".lora_A." in name else 1] for name, tensor in tensors.items()}
    if len(ranks) != 1:
        raise UserError(f"the adapter has different ranks: {sorted(ranks)}", todo="use one rank for all its parts")
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
    """Yield LoRA parameters under the names of a PEFT file. Raises UserError for any other tensor."""
    for name, tensor in weights:
        found = _NAME.fullmatch(name)
        if found is None:
            raise UserError(
                f"learner.publish.type is adapter, but {name!r} is not a LoRA parameter",
                why="an adapter contains only LoRA parameters: the model's own weights are not published",
                todo="train only LoRA parameters (learner.model.lora), or set learner.publish.type to disk or "
                "distributed",
            )
        yield f"{PREFIX}{found['module'].removeprefix(PREFIX)}.lora_{found['half']}.weight", tensor
