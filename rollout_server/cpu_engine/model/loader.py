"""Load safetensors into the fused tensors of the model. All tensors are verified before the first one is changed.

Fusing (q, k and v in one matrix, gate and up in another) saves calls. Rows of q and k are permuted so that the two
elements of each rotary pair are adjacent (in Hugging Face's layout they are half a head apart). Rotation is then one
complex multiplication. Attention scores do not change, because q and k have the same permutation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch
from safetensors.torch import load as parse_safetensors

from protocol.weights import DIGESTS
from rollout_server.cpu_engine.model.config import LayerPlan, ModelConfig

Tensors = dict[str, torch.Tensor]


NORMS = {
    "before": {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"},
    "after": {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"},
    "both": {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    },
}
"""Hugging Face's names of a layer's norms, by position."""
EXPERTS = {
    "gate_proj": ("mlp.", "gate", ("gate_proj", "up_proj", "down_proj")),
    "w1": ("block_sparse_moe.", "gate", ("w1", "w3", "w2")),
    "stacked": ("block_sparse_moe.", "router.layer", ("input_linear", "output_linear")),
}
"""Hugging Face's names of a mixture of experts: the module, its router, and the matrices of each expert or of all."""


class WeightsError(Exception):
    """The given tensors do not match this model. The weights in use were not changed."""


class RowSpan(NamedTuple):
    """A range of rows of one tensor. In each head, the first `rotary` rows are permuted for the rotation."""

    rows: int
    rotary: int = 0


class MlpTensors(TypedDict):
    """The MLP tensors of a Layer."""

    gate_up: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor | None
    down_bias: torch.Tensor | None
    mixture: MoeTensors | None


@dataclass(frozen=True)
class TensorSlot:
    """Storage of the tensor with one Hugging Face name: a view of a fused tensor, perhaps with permuted rows."""

    view: torch.Tensor
    order: torch.Tensor | None = None

    def put(self, source: torch.Tensor) -> None:
        self.view.copy_(source if self.order is None else source[self.order])

    def get(self) -> torch.Tensor:
        """Return it in Hugging Face's row order: a view where possible, to be read only."""
        if self.order is None:
            return self.view
        return self.view[torch.argsort(self.order)]


@dataclass(frozen=True)
class MoeTensors:
    """Tensors of an MLP with N experts. Hidden size E, intermediate size M."""

    router: torch.Tensor  # [N, E]
    gate_up: torch.Tensor  # [N, 2 * M, E]
    down: torch.Tensor  # [N, E, M]
    shared_gate: torch.Tensor | None  # [1, E]; None without a shared expert, which is the layer's MLP


@dataclass(frozen=True)
class Layer:
    """Tensors of one decoder layer. H query heads, K key/value heads of size D, hidden size E, intermediate size M."""

    before_attention: torch.Tensor | None  # norms, [E]
    after_attention: torch.Tensor | None
    before_mlp: torch.Tensor | None
    after_mlp: torch.Tensor | None
    qkv: torch.Tensor  # [(H + 2K) * D, E]
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None  # [D], or [H * D] over all heads
    k_norm: torch.Tensor | None  # [D], or [K * D]
    out: torch.Tensor  # [E, H * D]
    out_bias: torch.Tensor | None
    gate_up: torch.Tensor | None  # [2 * M, E]; None with experts only
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor | None  # [E, M]; None with experts only
    down_bias: torch.Tensor | None
    mixture: MoeTensors | None


class Weights:
    """All tensors of one model, uninitialised until they are set. `places`: Hugging Face name -> its storage."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        self.config, self.dtype = config, dtype
        self.places: dict[str, TensorSlot] = {}
        self._sums: dict[str, dict[str, str]] = {}
        """Name -> algorithm -> checksum, of tensors that have not been replaced since."""
        self.embed = self._whole("model.embed_tokens.weight", config.vocab, config.hidden)
        self.layers = [self._layer(f"model.layers.{i}.", plan) for i, plan in enumerate(config.plan)]
        self.norm = self._whole("model.norm.weight", config.hidden)
        self.head = self.embed if config.tied else self._whole("lm_head.weight", config.vocab, config.hidden)
        self.float32_head = self.head if dtype == torch.float32 else torch.empty_like(self.head, dtype=torch.float32)
        """`head` in float32, cached because converting it at each step costs more than the matrix product."""

    def load(self, directory: Path) -> None:
        """Replace every tensor by the one in `directory`. If it raises WeightsError, nothing has changed."""
        tensors = read_tensors(directory)
        self.verify(tensors)
        self._sums.clear()
        for name, place in self.places.items():
            place.put(tensors[name])
        self._renew_float32_head()

    def randomize(self) -> None:
        """Fill every tensor with random numbers."""
        self._sums.clear()
        for place in self.places.values():
            place.view.normal_()
        self._renew_float32_head()

    def verify(self, tensors: Tensors) -> None:
        """Raise WeightsError unless all names match, all shapes match, and all numbers are finite."""
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
        """Replace one tensor, given in any float dtype. After WeightsError this set must not be used."""
        place = self.places.get(name)
        if place is None:
            if self._spare(name):
                return
            raise WeightsError(f"unknown tensor {name!r}")
        self._check(name, place, tensor)
        self._sums.pop(name, None)
        place.put(tensor)
        if place.view is self.head:
            self._renew_float32_head()
        _check_finite(name, place.view)  # after the conversion: a float64 may overflow float32

    def _renew_float32_head(self) -> None:
        if self.float32_head is not self.head:
            self.float32_head.copy_(self.head)

    def _spare(self, name: str) -> bool:
        """Return whether a tensor of this name is allowed but not needed."""
        return (self.config.tied and name == "lm_head.weight") or name.endswith("rotary_emb.inv_freq")

    def _check(self, name: str, place: TensorSlot, tensor: torch.Tensor) -> None:
        if tensor.shape != place.view.shape:
            want, got = list(place.view.shape), list(tensor.shape)
            raise WeightsError(f"tensor {name!r} has shape {got}, expected {want}")
        if not tensor.is_floating_point():
            raise WeightsError(f"tensor {name!r} has dtype {tensor.dtype}, which is not a float type")

    def checksums(self, algorithm: str = "sha256") -> dict[str, str]:
        """Return the checksum (hex) of each tensor's bytes by name, in the engine's dtype and Hugging Face's layout."""
        return {name: self.checksum(name, algorithm) for name in sorted(self.places)}

    def checksum(self, name: str, algorithm: str = "sha256") -> str:
        """Return the checksum of one tensor, by one of DIGESTS. Cached until the tensor is replaced."""
        sums = self._sums.setdefault(name, {})
        if algorithm not in sums:
            plain = self.places[name].get().contiguous().view(torch.uint8)
            sums[algorithm] = DIGESTS[algorithm](plain.numpy().data)
        return sums[algorithm]

    def _whole(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(*shape, dtype=self.dtype)
        self.places[name] = TensorSlot(tensor)
        return tensor

    def _fused(self, parts: list[tuple[str, Sequence[RowSpan]]], *tail: int) -> torch.Tensor:
        """Create one tensor for several names, each with its ranges of rows."""
        tensor = torch.empty(sum(run.rows for _, runs in parts for run in runs), *tail, dtype=self.dtype)
        start = 0
        for name, runs in parts:
            count = sum(run.rows for run in runs)
            moved = any(run.rotary for run in runs)
            order = self._order(runs) if moved else None
            self.places[name] = TensorSlot(tensor[start : start + count], order)
            start += count
        return tensor

    def _order(self, runs: Sequence[RowSpan]) -> torch.Tensor:
        """Return the source index of each row; int64 [rows]."""
        orders, start = [], 0
        for run in runs:
            own = _rotation_order(run.rows, self.config.head_dim, run.rotary) if run.rotary else torch.arange(run.rows)
            orders.append(own + start)
            start += run.rows
        return torch.cat(orders)

    def _layer(self, at: str, plan: LayerPlan) -> Layer:
        c, traits = self.config, self.config.traits
        q, kv, rotary = c.heads * c.head_dim, c.kv_heads * c.head_dim, plan.rope.width if plan.rope else 0
        attn, norms = at + "self_attn.", NORMS[traits.norms]

        def qkv(kind: str, *tail: int) -> torch.Tensor:
            runs = [RowSpan(q, rotary), RowSpan(kv, rotary), RowSpan(kv)]
            if traits.fused:
                return self._fused([(f"{attn}qkv_proj.{kind}", runs)], *tail)
            names = ("q_proj", "k_proj", "v_proj")
            return self._fused([(f"{attn}{name}.{kind}", [run]) for name, run in zip(names, runs, strict=True)], *tail)

        def qk_norm(name: str, rows: int) -> torch.Tensor | None:
            rows = {"": 0, "head": c.head_dim, "all": rows}[traits.qk_norm]
            return self._fused([(f"{attn}{name}.weight", [RowSpan(rows, rotary)])]) if rows else None

        def norm(place: str) -> torch.Tensor | None:
            return self._whole(f"{at}{norms[place]}.weight", c.hidden) if place in norms else None

        return Layer(
            before_attention=norm("before_attention"),
            qkv=qkv("weight", c.hidden),
            qkv_bias=qkv("bias") if c.qkv_bias else None,
            q_norm=qk_norm("q_norm", q),
            k_norm=qk_norm("k_norm", kv),
            out=self._whole(attn + "o_proj.weight", c.hidden, q),
            out_bias=self._whole(attn + "o_proj.bias", c.hidden) if c.o_bias else None,
            after_attention=norm("after_attention"),
            before_mlp=norm("before_mlp"),
            after_mlp=norm("after_mlp"),
            **(self._mixture(at) if plan.experts else self._mlp(at + "mlp.", c.intermediate)),
        )

    def _mlp(self, at: str, intermediate: int) -> MlpTensors:
        c = self.config

        def gate_up(kind: str, *tail: int) -> torch.Tensor:
            if c.traits.fused:
                return self._fused([(f"{at}gate_up_proj.{kind}", [RowSpan(2 * intermediate)])], *tail)
            names = ("gate_proj", "up_proj")
            return self._fused([(f"{at}{name}.{kind}", [RowSpan(intermediate)]) for name in names], *tail)

        return {
            "gate_up": gate_up("weight", c.hidden),
            "gate_up_bias": gate_up("bias") if c.mlp_bias else None,
            "down": self._whole(at + "down_proj.weight", c.hidden, intermediate),
            "down_bias": self._whole(at + "down_proj.bias", c.hidden) if c.mlp_bias else None,
            "mixture": None,
        }

    def _mixture(self, layer: str) -> MlpTensors:
        c, e = self.config, self.config.experts
        assert e is not None and c.traits.experts
        module, router, names = EXPERTS[c.traits.experts]
        at = layer + module
        gate_up = torch.empty(e.count, 2 * e.intermediate, c.hidden, dtype=self.dtype)
        down = torch.empty(e.count, c.hidden, e.intermediate, dtype=self.dtype)
        if len(names) == 2:
            self.places |= {f"{at}{n}.weight": TensorSlot(t) for n, t in zip(names, (gate_up, down), strict=True)}
        else:
            for i in range(e.count):
                parts = gate_up[i, : e.intermediate], gate_up[i, e.intermediate :], down[i]
                named = zip(names, parts, strict=True)
                self.places |= {f"{at}experts.{i}.{name}.weight": TensorSlot(part) for name, part in named}
        shared = self._whole(at + "shared_expert_gate.weight", 1, c.hidden) if e.shared else None
        mixture = MoeTensors(self._whole(f"{at}{router}.weight", e.count, c.hidden), gate_up, down, shared)
        if shared is not None:
            return {**self._mlp(at + "shared_expert.", e.shared), "mixture": mixture}
        return {"gate_up": None, "gate_up_bias": None, "down": None, "down_bias": None, "mixture": mixture}


def read_tensors(directory: Path) -> Tensors:
    """Read all tensors of the safetensors in `directory` into memory. Raises WeightsError.

    The files are read, not mapped: truncating a mapped file would kill this process with SIGBUS.
    """
    index = directory / "model.safetensors.index.json"
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            files = [directory / name for name in names]
            if strange := [name for name, file in zip(names, files, strict=True) if file.parent != directory]:
                raise WeightsError(f"{strange[0]!r} in {index.name} is not the name of a file in the same directory")
        else:
            files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"there are no safetensors in {directory}")
        tensors: Tensors = {}
        for file in files:
            tensors.update(parse_safetensors(file.read_bytes()))
        return tensors
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"cannot read the weights in {directory}: {error}") from error
    except Exception as error:
        # for a broken file, safetensors raises a class that is private to its Rust code
        if type(error).__name__ != "SafetensorError":
            raise
        raise WeightsError(f"broken safetensors in {directory}: {error}") from error


def _check_finite(name: str, tensor: torch.Tensor) -> None:
    # one pass over memory instead of four with isfinite; a sum may overflow, so only a finite sum is conclusive
    if not bool(torch.isfinite(tensor.sum())) and not bool(torch.isfinite(tensor).all()):
        raise WeightsError(f"tensor {name!r} contains values that are not finite")


def _rotation_order(rows: int, head_dim: int, rotary: int) -> torch.Tensor:
    """Return the row permutation for adjacent rotary pairs; int64 [rows].

    The first R = `rotary` rows of each head, (0..R/2-1, R/2..R-1), become (0, R/2, 1, R/2+1, ...). The others stay.
    """
    pairs = torch.arange(rotary).view(2, rotary // 2).t().reshape(-1)
    head = torch.cat((pairs, torch.arange(rotary, head_dim)))
    return (torch.arange(0, rows, head_dim)[:, None] + head).reshape(-1)
