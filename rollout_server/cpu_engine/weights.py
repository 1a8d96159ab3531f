"""From safetensors on disk to the fused tensors of the model, all verified before the first one is touched.

Fusing (q, k and v in one matrix, gate and up in another) saves calls. Rows of q and k are moved so that the two
numbers that rotary embedding turns together lie side by side (Hugging Face keeps them half a head apart): the
rotation is then one complex multiplication. Attention scores do not change, because q and k are moved alike.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load as parse_safetensors

from rollout_server.cpu_engine.model_config import ModelConfig

Tensors = dict[str, torch.Tensor]


class WeightsError(Exception):
    """What came does not hold exactly this model's tensors. The weights in use were not changed."""


@dataclass(frozen=True)
class Place:
    """Where the tensor of one Hugging Face name lives: a view of a fused tensor, its rows perhaps moved."""

    view: torch.Tensor
    order: torch.Tensor | None = None

    def put(self, source: torch.Tensor) -> None:
        self.view.copy_(source if self.order is None else source[self.order])

    def get(self) -> torch.Tensor:
        """A copy in Hugging Face's own row order."""
        if self.order is None:
            return self.view.clone()
        return self.view[torch.argsort(self.order)]


@dataclass(frozen=True)
class Layer:
    """Tensors of one decoder layer. H query heads, K key/value heads of D, hidden E, intermediate M."""

    input_norm: torch.Tensor  # [E]
    qkv: torch.Tensor  # [(H + 2K) * D, E]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D]
    k_norm: torch.Tensor | None  # [D]
    out: torch.Tensor  # [E, H * D]
    out_bias: torch.Tensor | None
    post_norm: torch.Tensor  # [E]
    gate_up: torch.Tensor  # [2 * M, E]
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor  # [E, M]
    down_bias: torch.Tensor | None


class Weights:
    """All tensors of one model, of any content until they are put. `places`: Hugging Face name -> its storage."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.places: dict[str, Place] = {}
        self._sums: dict[str, str] = {}
        """Checksums of what has not been replaced since they were taken."""
        self.embed = self._whole("model.embed_tokens.weight", config.vocab, config.hidden)
        self.layers = [self._layer(f"model.layers.{i}.") for i in range(config.layers)]
        self.norm = self._whole("model.norm.weight", config.hidden)
        self.head = self.embed if config.tied else self._whole("lm_head.weight", config.vocab, config.hidden)

    def load(self, directory: Path) -> None:
        """Replace every tensor by the one in `directory`. Raises WeightsError, and then nothing has changed."""
        tensors = read_tensors(directory)
        self.verify(tensors)
        self._sums.clear()
        for name, place in self.places.items():
            place.put(tensors[name])

    def randomize(self) -> None:
        """Replace every number by a random one."""
        self._sums.clear()
        for place in self.places.values():
            place.view.normal_()

    def verify(self, tensors: Tensors) -> None:
        """Every name there, none too many, every shape right, every number finite; else WeightsError."""
        missing = sorted(self.places.keys() - tensors.keys())
        extra = sorted(name for name in tensors.keys() - self.places.keys() if not self._spare(name))
        if missing:
            raise WeightsError(f"{len(missing)} tensor(s) missing, first {missing[0]!r}")
        if extra:
            raise WeightsError(f"{len(extra)} unknown tensor(s), first {extra[0]!r}")
        for name, place in self.places.items():
            self._check(name, place, tensors[name])
            _check_finite(name, tensors[name])

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace one tensor, given in any float dtype. Raises WeightsError; then this set is not to be used."""
        place = self.places.get(name)
        if place is None:
            if self._spare(name):
                return
            raise WeightsError(f"unknown tensor {name!r}")
        self._check(name, place, tensor)
        self._sums.pop(name, None)
        place.put(tensor)
        _check_finite(name, place.view)  # after the conversion: a float64 may be beyond float32

    def _spare(self, name: str) -> bool:
        """Whether a tensor of this name may come along and is not needed."""
        return (self.config.tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")

    def _check(self, name: str, place: Place, tensor: torch.Tensor) -> None:
        if tensor.shape != place.view.shape:
            want, got = list(place.view.shape), list(tensor.shape)
            raise WeightsError(f"tensor {name!r} has shape {got}, the model has {want}")
        if not tensor.is_floating_point():
            raise WeightsError(f"tensor {name!r} is of {tensor.dtype}, which is no float")

    def checksums(self) -> dict[str, str]:
        """sha256 (hex) of each tensor's bytes in the engine's dtype and Hugging Face's layout, by name."""
        return {name: self.checksum(name) for name in sorted(self.places)}

    def checksum(self, name: str) -> str:
        """That of one tensor, which is read once and not again before it is replaced."""
        if name not in self._sums:
            self._sums[name] = _digest(self.places[name].get())
        return self._sums[name]

    def _whole(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(*shape, dtype=self.dtype)
        self.places[name] = Place(tensor)
        return tensor

    def _fused(self, parts: list[tuple[str, int, bool]], *tail: int) -> torch.Tensor:
        """One tensor for several names: `parts` are (name, rows, whether its rows are moved for the rotation)."""
        tensor = torch.empty(sum(rows for _, rows, _ in parts), *tail, dtype=self.dtype)
        start = 0
        for name, rows, moved in parts:
            order = _rotation_order(rows, self.config.head_dim) if moved else None
            self.places[name] = Place(tensor[start : start + rows], order)
            start += rows
        return tensor

    def _layer(self, at: str) -> Layer:
        c = self.config
        q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
        attn, mlp = at + "self_attn.", at + "mlp."

        def qkv(kind: str, *tail: int) -> torch.Tensor:
            rows = (("q_proj", q, True), ("k_proj", kv, True), ("v_proj", kv, False))
            return self._fused([(f"{attn}{name}.{kind}", n, moved) for name, n, moved in rows], *tail)

        def gate_up(kind: str, *tail: int) -> torch.Tensor:
            return self._fused(
                [(f"{mlp}{name}.{kind}", c.intermediate, False) for name in ("gate_proj", "up_proj")], *tail
            )

        return Layer(
            input_norm=self._whole(at + "input_layernorm.weight", c.hidden),
            qkv=qkv("weight", c.hidden),
            qkv_bias=qkv("bias") if c.qkv_bias else None,
            q_norm=self._fused([(attn + "q_norm.weight", c.head_dim, True)]) if c.qk_norm else None,
            k_norm=self._fused([(attn + "k_norm.weight", c.head_dim, True)]) if c.qk_norm else None,
            out=self._whole(attn + "o_proj.weight", c.hidden, q),
            out_bias=self._whole(attn + "o_proj.bias", c.hidden) if c.o_bias else None,
            post_norm=self._whole(at + "post_attention_layernorm.weight", c.hidden),
            gate_up=gate_up("weight", c.hidden),
            gate_up_bias=gate_up("bias") if c.mlp_bias else None,
            down=self._whole(mlp + "down_proj.weight", c.hidden, c.intermediate),
            down_bias=self._whole(mlp + "down_proj.bias", c.hidden) if c.mlp_bias else None,
        )


def read_tensors(directory: Path) -> Tensors:
    """Every tensor of `directory`'s safetensors, read into memory. Raises WeightsError.

    Bytes are read, not mapped: a publisher that truncates a mapped file would kill this process with SIGBUS.
    """
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [directory / name for name in names]
            if strange := [name for name, file in zip(names, files, strict=True) if file.parent != directory]:
                raise WeightsError(f"{strange[0]!r} in {index.name} is not the name of a file beside it")
        else:
            files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"no safetensors in {directory}")
        tensors: Tensors = {}
        for file in files:
            tensors.update(parse_safetensors(file.read_bytes()))
        return tensors
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"cannot read the weights in {directory}: {error}") from error
    except Exception as error:
        # safetensors raises a class of its own, private to its Rust part, for a broken file
        if type(error).__name__ != "SafetensorError":
            raise
        raise WeightsError(f"broken safetensors in {directory}: {error}") from error


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    # one pass over memory where isfinite needs four; a sum may overflow, so only "finite" is believed
    if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
        raise WeightsError(f"tensor {name!r} holds values that are not finite numbers")


def _rotation_order(rows: int, head_dim: int) -> torch.Tensor:
    """Index that turns each head's (0..D/2-1, D/2..D-1) into pairs (0, D/2, 1, D/2+1, ...). int64 [rows]."""
    pairs = torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)
    return (torch.arange(0, rows, head_dim)[:, None] + pairs).reshape(-1)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
