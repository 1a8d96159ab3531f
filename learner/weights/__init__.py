"""Weight sync: how each new policy version reaches the engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, cast

from learner.config.learner import (
    AdapterPublishSettings,
    DiskPublishSettings,
    DistributedPublishSettings,
    PublishSettings,
)
from learner.config.model import LoraSettings
from protocol.settings import RunSettings, Settings

if TYPE_CHECKING:
    from learner.weights.base import EngineLink, WeightPublisher

REGISTRY: dict[type[Settings], str] = {
    DiskPublishSettings: "learner.weights.disk:DiskPublisher",
    DistributedPublishSettings: "learner.weights.broadcast:DistributedPublisher",
    AdapterPublishSettings: "learner.weights.adapter:AdapterPublisher",
}
"""Settings class -> "module:Class"; the class takes the arguments of `build_publisher` in the same order."""


def build_publisher(
    settings: PublishSettings,
    run: RunSettings,
    model_files: Sequence[Path],
    link: EngineLink,
    lora: LoraSettings | None = None,
) -> WeightPublisher:
    """Return an instance of the transport that `settings` select. Imports torch and safetensors.

    model_files  configuration and tokenizer of `run.model`: everything beside the weights
    lora         of the adapter, if one is published
    """
    more = {"alpha": (lora or LoraSettings()).alpha} if settings.type == "adapter" else {}
    return cast("WeightPublisher", resolve_name(REGISTRY[type(settings)])(settings, run, model_files, link, **more))
