"""LoRA adapters (Hu et al. 2021): y = W x + scale * B A x, applied without merging into W.

Requests of one batch may therefore use different adapters, and new base weights do not affect them.

Read from PEFT's layout. Where the model has fused weights (q, k, v; gate, up), the adapter is fused too: the A matrices
are stacked, the B matrices are the blocks of a block-diagonal matrix, scaled, with rows permuted like the weights.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load as parse_safetensors

from rollout_server.cpu_engine.model.loader import Weights, WeightsError

Linear = Literal["qkv", "out", "gate_up", "down"]
LINEAR: dict[str, Linear] = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    "o_proj": "out",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj"), "gate_up"),
    "down_proj": "down",
}
"""Hugging Face module -> the fused linear layer that contains it."""
PLAIN = {"bias": "none", "use_dora": False, "fan_in_fan_out": False, "modules_to_save": None, "rank_pattern": {}}
"""PEFT settings that are accepted only with these values, or empty."""

_NAME = re.compile(r"(?:base_model\.model\.)?(model\.layers\.(\d+)\..+\.(\w+))\.lora_([AB])(?:\.default)?\.weight")
_numbers = itertools.count(1)


@dataclass(frozen=True)
class Delta:
    """Update of one fused linear layer: `up` @ `down` @ x. R: sum of the ranks of its parts."""

    down: torch.Tensor  # [R, in]
    up: torch.Tensor  # [out, R]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Map [T, in] to [T, out]."""
        return torch.nn.functional.linear(torch.nn.functional.linear(x, self.down), self.up)


@dataclass(frozen=True, eq=False)
class Adapter:
    """A loaded adapter. `number` is unique, unlike the name. `layers`: deltas by decoder layer and linear layer."""

    name: str
    path: Path
    number: int
    layers: list[dict[Linear, Delta]]


@dataclass(frozen=True)
class AdapterPart:
    """The tokens of a forward pass that use one adapter. `tokens`: int64 indices, None for all."""

    adapter: Adapter
    tokens: torch.Tensor | None


def adapted(y: torch.Tensor, x: torch.Tensor, parts: Sequence[AdapterPart], layer: int, linear: Linear) -> torch.Tensor:
    """Add the adapters' output for x [T, in] to y [T, out] in place. Return y."""
    for part in parts:
        delta = part.adapter.layers[layer].get(linear)
        if delta is None:
            continue
        if part.tokens is None:
            y += delta(x)
        else:
            y.index_add_(0, part.tokens, delta(x[part.tokens]))
    return y


def read_adapter(name: str, path: Path, weights: Weights) -> Adapter:
    """Read and verify an adapter for the model of `weights`. Raises WeightsError."""
    try:
        config = json.loads((path / "adapter_config.json").read_text())
        tensors = parse_safetensors((path / "adapter_model.safetensors").read_bytes())
        scale = _scale(config)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"cannot read the adapter in {path}: {error}") from error
    except Exception as error:
        # for a broken file, safetensors raises a class that is private to its Rust code
        if type(error).__name__ != "SafetensorError":
            raise
        raise WeightsError(f"broken safetensors in {path}: {error}") from error
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        match = _NAME.fullmatch(key)
        if match is None or match[3] not in LINEAR or f"{match[1]}.weight" not in weights.places:
            raise WeightsError(f"the adapter's tensor {key!r} does not belong to a linear layer that supports adapters")
        if ".experts." in match[1]:
            raise WeightsError(
                f"the adapter's tensor {key!r} belongs to an expert, and adapters of experts are not supported"
            )
        parts.setdefault(match[1], {})[match[4]] = tensor
    if not parts:
        raise WeightsError(f"the adapter in {path} is empty")
    return Adapter(name, path, next(_numbers), _layers(parts, scale, weights))


def _scale(config: dict[str, Any]) -> float:
    """Return alpha / r, or alpha / sqrt(r) (rank-stabilised, Kalajdzievski 2023)."""
    for key, value in PLAIN.items():
        if config.get(key) and config[key] != value:
            raise ValueError(f"{key}={config[key]!r} is not supported")
    if config.get("alpha_pattern"):
        raise ValueError("alpha_pattern is not supported")
    rank = int(config["r"])
    return float(config["lora_alpha"]) / (rank**0.5 if config.get("use_rslora") else rank)


def _layers(parts: dict[str, dict[str, torch.Tensor]], scale: float, weights: Weights) -> list[dict[Linear, Delta]]:
    """Return the deltas by layer and fused linear layer."""
    fused: list[dict[Linear, list[tuple[str, torch.Tensor, torch.Tensor]]]] = [{} for _ in weights.layers]
    for module, pair in sorted(parts.items()):
        _check(module, pair, weights.places[f"{module}.weight"].view.shape)
        number, linear = int(module.split(".")[2]), LINEAR[module.rsplit(".", 1)[1]]
        fused[number].setdefault(linear, []).append((module, pair["A"], pair["B"]))
    return [
        {linear: _fuse(getattr(layer, linear), members, scale, weights) for linear, members in found.items()}
        for layer, found in zip(weights.layers, fused, strict=True)
    ]


def _fuse(
    matrix: torch.Tensor, members: list[tuple[str, torch.Tensor, torch.Tensor]], scale: float, weights: Weights
) -> Delta:
    """Fuse the members (module, A [r, in], B [rows, r]) of `matrix` [out, in] into one delta."""
    up = torch.zeros(matrix.shape[0], sum(len(a) for _, a, _ in members), dtype=weights.dtype)
    column = 0
    for module, a, b in members:
        place = weights.places[f"{module}.weight"]
        row = place.view.storage_offset() // matrix.shape[1]
        moved = b if place.order is None else b[place.order]
        up[row : row + len(b), column : column + len(a)] = moved.float() * scale
        column += len(a)
    return Delta(torch.cat([a for _, a, _ in members]).to(weights.dtype), up)


def _check(module: str, pair: dict[str, torch.Tensor], shape: torch.Size) -> None:
    if pair.keys() != {"A", "B"}:
        raise WeightsError(f"the adapter has only one of the two matrices of {module!r}")
    a, b = pair["A"], pair["B"]
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != shape[1] or b.shape != (shape[0], a.shape[0]):
        raise WeightsError(
            f"the adapter's matrices of {module!r} have wrong shapes, {list(a.shape)} and {list(b.shape)}"
        )
    for tensor in (a, b):
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"the adapter of {module!r} contains values that are not finite")
