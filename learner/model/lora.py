"""LoRA with peft: adapters in the policy, published as merged weights or as adapters alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from learner.config.model import LoraSettings
from protocol.errors import UserError

log = logging.getLogger(__name__)

Named = Iterable[tuple[str, torch.Tensor]]
ADAPTER = "default"
"""peft's name of the only adapter."""
_BASE, _A, _B = ".base_layer.", f".lora_A.{ADAPTER}.weight", f".lora_B.{ADAPTER}.weight"


def add_adapters(causal: Any, settings: LoraSettings) -> None:
    """Add adapters with an initial product of 0 to linear layers of a transformers model, and freeze the rest.

    Experts, routers and the layers named by `_left_out` get none; the log says so. Raises UserError if a name in
    `target_modules` matches no layer or one of them, or the output layer or the embedding (they may be tied).
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
    layers = [name for name, module in causal.named_modules() if _is_linear(module) and module not in ends]
    left_out = {name: why for name in layers if (why := _left_out(causal, name))}
    chosen = [name for name in layers if name not in left_out]
    left_out |= dict.fromkeys(_stacked(causal), EXPERT)
    if settings.target_modules or not chosen:
        chosen = _chosen(settings.target_modules, layers, left_out)
    for why in sorted(set(left_out.values())) if not settings.target_modules else ():
        without = {".".join(name.split(".")[-2:]) for name, reason in left_out.items() if reason == why}
        log.info("LoRA: no adapter for %s: %s", ", ".join(sorted(without)), why)
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number works
        lora_dropout=0.0,
        target_modules=chosen,
        task_type="CAUSAL_LM",
    )
    inject_adapter_in_model(config, causal, adapter_name=ADAPTER)
    for name, parameter in causal.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def _chosen(names: Sequence[str], layers: Sequence[str], left_out: Mapping[str, str]) -> list[str]:
    """Return the layers with these names or ends of names. Raises UserError unless each name has one, and none of them
    is in `left_out`."""
    found, wrong = list[str](), dict[str, str]()
    for name in names:
        at = [layer for layer in layers if f".{layer}".endswith(f".{name}")]
        why = next((why for layer, why in left_out.items() if layer in at or name in layer.split(".")), "")
        if why or not at:
            wrong[name] = why or "the model has no linear layer of this name"
        found += at
    if names and not wrong:
        return list(dict.fromkeys(found))
    kinds = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers if layer not in left_out}))
    raise UserError(
        f"no adapters for learner.model.lora.target_modules: {', '.join(wrong) or 'not set'}",
        why="; ".join(sorted(set((wrong or left_out).values()))),
        todo=f"choose from {kinds}" if kinds else "train all weights: set learner.model.lora.rank to 0",
    )


EXPERT = "experts and routers are not adapted, because peft and engines load such adapters in different layouts"
ROUTERS = {"gate", "router", "shared_expert_gate"}
"""Names of modules that choose experts; some are linear layers."""


def _left_out(causal: Any, name: str) -> str:
    """Return why the linear layer `name` gets no adapter, or ""."""
    path, above = name.split("."), causal.get_submodule(name.rpartition(".")[0])
    if "experts" in path or ROUTERS & set(path):
        return EXPERT
    if _means_experts(causal, path[-1]):
        return f"peft and engines take this name for experts of a {causal.config.model_type} model"
    if path[-1] in ("x_proj", "dt_proj", "out_proj") and hasattr(above, "D"):
        return "Mamba's computation reads these matrices past their adapters"
    if path[-1] in ("correction_coefs", "prediction_coefs"):
        return "Gemma 3n clips these matrices in training, past their adapters"
    if not isinstance(causal.get_submodule(name), torch.nn.Linear):
        return "its matrices are transposed (Conv1D of transformers), which adapters do not support"
    return ""


def _means_experts(causal: Any, name: str) -> bool:
    """Return whether peft adapts the stacked experts or the router if an adapter's target_modules contain `name`."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, causal, None)
    except ValueError:  # a part of a stacked parameter, which peft adapts only with the others
        return True
    return not config.target_modules


def _stacked(causal: Any) -> Iterator[str]:
    """Yield the names of parameters that stack one matrix for each expert."""
    for name, module in causal.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 3 and not isinstance(module, torch.nn.Conv1d):
                yield f"{name}.{kind}"


def _is_linear(module: torch.nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (torch.nn.Linear, Conv1D))


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
