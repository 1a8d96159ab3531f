"""LoRA by peft: adapters in the policy, and what is published of them: merged weights, or the adapters alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from learner.config.model import LoraSettings
from protocol.errors import UserError

Named = Iterable[tuple[str, torch.Tensor]]
ADAPTER = "default"
"""peft's name of an only adapter."""
_BASE, _A, _B = ".base_layer.", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def add_adapters(causal: Any, settings: LoraSettings) -> None:
    """Give linear layers of a transformers model adapters whose product is 0 at first, and freeze all else.

    Raises UserError when no layer has one of the names, or the output layer has, or the embedding (they may be tied).
    """
    from peft import LoraConfig, inject_adapter_in_model

    ends = (causal.get_input_embeddings(), causal.get_output_embeddings())
    outer = {name.rpartition(".")[2] for name, module in causal.named_modules() if module in ends}
    if refused := outer & set(settings.target_modules):
        raise UserError(
            f"learner.model.lora.target_modules names {', '.join(sorted(refused))}",
            why="embedding and output layer may be one matrix, to which an adapter cannot be added on one side",
            todo="leave it out: adapters are for the linear layers between the two",
        )
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number does
        lora_dropout=0.0,
        target_modules=list(settings.target_modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        inject_adapter_in_model(config, causal, adapter_name=ADAPTER)
    except ValueError as error:
        kinds = sorted({name.rpartition(".")[2] for name, m in causal.named_modules() if type(m) is torch.nn.Linear})
        raise UserError(
            f"no adapters fit the model: target_modules is {', '.join(settings.target_modules) or 'not set'}",
            why=str(error)[:300],
            todo=f"choose among {', '.join(kinds)}",
        ) from None
    for name, parameter in causal.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def scale_of(settings: LoraSettings) -> float:
    """Return what an adapter's product is multiplied by."""
    return settings.alpha / settings.rank


@contextmanager
def adapters_off(module: torch.nn.Module) -> Iterator[None]:
    """Within, `module` computes as if it had no adapters; no-op where it has none."""
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
    """Yield weights of an adapted model as those of the plain one: its names, its order, W + scale * B @ A in W's
    dtype.

    weights  (name, tensor) in the order of `named_parameters`: of each adapted layer weight, bias, A, B. What is not
             adapted passes through. Raises ValueError when a layer's adapter is not whole.
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
                raise ValueError(f"{name} comes without its weight and its lora_A")
            held["weight"] = merge(held["weight"], a, tensor, scale)
            yield from ((f"{layer}.{kind}", value) for kind, value in held.items())
            layer, held, a = "", {}, None
        else:
            yield name, tensor
    if held:
        raise ValueError(f"the adapter of {layer} is missing")


def merge(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """weight + scale * b @ a in float32, rounded once to the weight's dtype."""
    return (weight.float() + scale * (b.float() @ a.float())).to(weight.dtype)


def adapter_only(weights: Named) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield those of `weights` that belong to adapters, as `{module}.lora_A.weight` and `{module}.lora_B.weight`."""
    for name, tensor in weights:
        if name.endswith((_A, _B)):
            yield name.replace(f".{ADAPTER}.weight", ".weight"), tensor
