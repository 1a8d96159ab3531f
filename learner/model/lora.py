"""LoRA with peft: adapters in the policy, published as merged weights or as adapters alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from learner.config.model import LoraSettings
from protocol.errors import UserError

Named = Iterable[tuple[str, torch.Tensor]]
ADAPTER = "default"
"""peft's name of the only adapter."""
_BASE, _A, _B = ".base_layer.", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def add_adapters(causal: Any, settings: LoraSettings) -> None:
    """Add adapters with an initial product of 0 to linear layers of a transformers model, and freeze the rest.

    Raises UserError if no layer matches the names, or if the output layer or the embedding does (they may be tied).
    """
    from peft import LoraConfig, inject_adapter_in_model

    ends = (causal.get_input_embeddings(), causal.get_output_embeddings())
    outer = {name.rpartition(".")[2] for name, module in causal.named_modules() if module in ends}
    if refused := outer & set(settings.target_modules):
        raise UserError(
            f"learner.model.lora.target_modules names {', '.join(sorted(refused))}",
            why="embedding and output layer may share one matrix, which cannot have an adapter on one side only",
            todo="remove them: adapters are for the linear layers in between",
        )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number works
        lora_dropout=0.0,
        target_modules=list(settings.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, causal, adapter_name=ADAPTER)
    except ValueError as error:
        kinds = sorted({name.rpartition(".")[2] for name, m in causal.named_modules() if type(m) is torch.nn.Linear})
        raise UserError(
            f"no layer matches learner.model.lora.target_modules: {', '.join(settings.target_modules) or 'not set'}",
            why=str(error)[:300],
            todo=f"choose from {', '.join(kinds)}",
        ) from None
    for name, parameter in causal.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def scale_of(settings: LoraSettings) -> float:
    """Return the factor of an adapter's product."""
    return settings.alpha / settings.rank


@contextmanager
def adapters_off(module: torch.nn.Module) -> Iterator[None]:
    """Disable the adapters of `module` inside the context; a no-op if it has none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in module.modules() if isinstance(m, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged(weights: Named, scale: float) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of an adapted model under the plain model's names and order: W + scale * B @ A in W's dtype.


    weights  (name, tensor) in the order of `named_parameters`: weight, bias, A, B of each adapted layer. Other weights
             pass through. Raises ValueError if a layer's adapter is incomplete.
    """
    layer, held, a = "", {}, None  # type: str, dict[str, torch.Tensor], torch.Tensor | None
    for name, tensor in weights:
        if _BASE in name:
            if held and not name.startswith(layer + _BASE):
                raise ValueError(f"the adapter of {layer} is missing")
            layer, _, kind = name.partition(_BASE)
            held[kind] = tensor
        elif name.endswith(_A):
            a = tensor
        elif name.endswith(_B):
            if a is None or name != layer + _B:
                raise ValueError(f"{name} has no preceding weight and lora_A")
            held["weight"] = merge(held["weight"], a, tensor, scale)
            yield from ((f"{layer}.{kind}", value) for kind, value in held.items())
            layer, held, a = "", {}, None
        else:
            yield name, tensor
    if held:
        raise ValueError(f"the adapter of {layer} is missing")


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return weight + scale * b @ a, computed in float32, rounded once to the weight's dtype."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def adapter_only(weights: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the adapters among `weights`, as `{module}.lora_A.weight` and `{module}.lora_B.weight`."""
    for name, tensor in weights:
        if name.endswith((_A, _B)):
            yield name.replace(f".{ADAPTER}.weight", ".weight"), tensor
