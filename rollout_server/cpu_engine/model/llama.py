"""The forward pass of a decoder of the Llama family over dense rows of keys and values. Differences between families
(`model/config.py`, FAMILIES) are omitted here.

    tokens [T] = decode tokens (one per running row, rows 0..B-1), then prompt tokens of N new rows (B..B+N-1), packed
       embed -> { norm -> qkv -> rotate -> write keys, values -> attend -> out -> + -> norm -> gate, up -> down ->
       + } * L -> norm

All but attention runs on packed tokens, without padding. Attention runs in two parts: decode rows as batched matrix
products, prompt rows padded to the longest new part.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rollout_server.cpu_engine.model.config import ModelConfig, Rope
from rollout_server.cpu_engine.model.loader import Layer, MoeTensors, Weights
from rollout_server.cpu_engine.model.lora import AdapterPart, adapted
from rollout_server.cpu_engine.scheduler.kv_cache import KVCache


@dataclass(frozen=True)
class DecodePart:
    """The first `count` tokens: one per row 0..count-1."""

    count: int
    width: int
    masks: dict[
        int, torch.Tensor
    ]  # window -> [count, 1, 1, width]: 0, or -inf where there is no token or it is outside the window


@dataclass(frozen=True)
class PromptPart:
    """New parts of some rows, of similar length, padded to the longest one."""

    rows: torch.Tensor  # int64 [rows]
    longest: int
    width: int
    token: torch.Tensor  # int64 [T']: index of each token among those of all prompts
    row: torch.Tensor  # int64 [T']: its row, as an index into `rows`
    offset: torch.Tensor  # int64 [T']: its index within the row's new part
    masks: dict[int, torch.Tensor]  # window -> [rows, 1, longest, width]


class CausalLM:
    """Weights and forward pass. Not thread-safe: owned by the engine thread."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights = config, weights
        ropes = {layer.rope for layer in config.plan if layer.rope is not None}
        self.rotations = {rope: rotation_table(rope, config.head_dim, config.context) for rope in ropes}
        self.scale, self.residual_scale = config.attention_scale, config.residual_scale
        self.norm_offset, self.silu = config.traits.norm_offset, config.traits.activation == "silu"
        self.windows = sorted({layer.window for layer in config.plan})
        self.layers_done = 0
        """Layers computed since the start, output heads included: shows progress within a step. Read by any thread."""

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        rows: torch.Tensor,
        kv: KVCache,
        decode: DecodePart | None,
        prompts: Sequence[PromptPart],
        adapters: Sequence[AdapterPart] = (),
    ) -> torch.Tensor:
        """Return the hidden states [T, E] after the last norm. Writes keys and values to `kv`.

        ids, positions, rows: int64 [T]
        """
        c = self.config
        rotations = {rope: table[positions][:, None] for rope, table in self.rotations.items()}
        address = kv.address(rows, positions)
        rotated = (c.heads + c.kv_heads) * c.head_dim
        x = self.weights.embed[ids]
        if c.embedding_scale != 1:
            x = x * torch.tensor(c.embedding_scale, dtype=x.dtype)
        for number, (layer, plan) in enumerate(zip(self.weights.layers, c.plan, strict=True)):
            h = self._norm(x, layer.before_attention)
            qkv = adapted(F.linear(h, layer.qkv, layer.qkv_bias), h, adapters, number, "qkv")
            qk = qkv[:, :rotated].view(len(ids), -1, c.head_dim)
            if layer.q_norm is not None and layer.k_norm is not None:
                whole = layer.q_norm.shape[0] > c.head_dim  # norm over all heads together
                parts = [part.flatten(1) if whole else part for part in (qk[:, : c.heads], qk[:, c.heads :])]
                normed = (self._norm(parts[0], layer.q_norm), self._norm(parts[1], layer.k_norm))
                qk = torch.cat(normed, 1).view_as(qk)
            if plan.rope is not None:
                qk = rotate(qk, rotations[plan.rope])
            kv.write(number, address, qk[:, c.heads :], qkv[:, rotated:])
            mixed = self._attend(qk[:, : c.heads], kv.keys[number], kv.values[number], decode, prompts, plan.window)
            out = adapted(F.linear(mixed, layer.out, layer.out_bias), mixed, adapters, number, "out")
            x = self._add(x, self._norm(out, layer.after_attention))
            h = self._norm(x, layer.before_mlp)
            mixture = layer.mixture
            if mixture is None:
                out = self._mlp(h, layer, adapters, number)
            else:
                out = self._mix(h, mixture)
                if mixture.shared_gate is not None:
                    share = torch.sigmoid(F.linear(h, mixture.shared_gate))
                    out += share * self._mlp(h, layer, adapters, number)
            x = self._add(x, self._norm(out, layer.after_mlp))
            self.layers_done += 1
        return self._norm(x, self.weights.norm)

    def _add(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y if self.residual_scale == 1 else x + y * self.residual_scale

    def _mlp(self, h: torch.Tensor, layer: Layer, adapters: Sequence[AdapterPart], number: int) -> torch.Tensor:
        assert layer.gate_up is not None and layer.down is not None
        inner = self._gated(adapted(F.linear(h, layer.gate_up, layer.gate_up_bias), h, adapters, number, "gate_up"))
        return adapted(F.linear(inner, layer.down, layer.down_bias), inner, adapters, number, "down")

    def _gated(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Apply the gated activation: [T, 2 * M] -> [T, M]."""
        gate, up = gate_up.chunk(2, -1)
        if self.silu:
            return F.silu(gate).mul_(up)
        return F.gelu(gate, approximate="tanh").mul_(up)

    def _mix(self, h: torch.Tensor, mixture: MoeTensors) -> torch.Tensor:
        """Apply to [T, E] the experts that the router chooses for each token."""
        experts = self.config.experts
        assert experts is not None
        shares, chosen = torch.softmax(F.linear(h, mixture.router).float(), -1).topk(experts.chosen, -1)
        if experts.normalized:
            shares = shares / shares.sum(-1, keepdim=True)
        mixed, shares = torch.zeros_like(h), shares.to(h.dtype)
        for expert in sorted(set(chosen.flatten().tolist())):
            token, place = torch.where(chosen == expert)
            inner = self._gated(F.linear(h[token], mixture.gate_up[expert]))
            mixed.index_add_(0, token, F.linear(inner, mixture.down[expert]) * shares[token, place, None])
        return mixed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 [T, V], also for bfloat16 weights (SGLang: --enable-fp32-lm-head)."""
        with exact_bfloat16_products(hidden.dtype):
            logits = F.linear(hidden.float(), self.weights.float32_head)
        self.layers_done += 1
        return logits if self.config.logits_scale == 1 else logits.mul_(self.config.logits_scale)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is None:
            return x
        if self.norm_offset:  # in float32, as in transformers: a bfloat16 near 1 keeps only 8 bits of the weight
            weight = weight.float() + self.norm_offset
            return F.rms_norm(x.float(), (x.shape[-1],), weight, self.config.eps).to(x.dtype)
        return F.rms_norm(x, (x.shape[-1],), weight, self.config.eps)

    def _attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        decode: DecodePart | None,
        prompts: Sequence[PromptPart],
        window: int,
    ) -> torch.Tensor:
        """Attend with q [T, H, D] to keys and values [rows, K, width, D]. Return [T, H * D]."""
        parts = []
        if decode is not None:
            c, n = self.config, decode.count
            # the queries of one key/value head are the rows of one small matrix product
            grouped = q[:n].view(n, c.kv_heads, c.group, c.head_dim)
            seen = keys[:n, :, : decode.width], values[:n, :, : decode.width]
            parts.append(self._attend_decode(grouped, *seen, decode.masks[window]).reshape(n, -1))
            q = q[n:]
        if prompts:
            mixed = q.new_empty(len(q), q.shape[1] * q.shape[2])
            for part in prompts:
                mixed[part.token] = self._attend_prompts(q[part.token], keys, values, part, part.masks[window])
            parts.append(mixed)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_decode(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Attend with q [rows, K, G, D] to keys and values [rows, K, width, D]. Return [rows, K, G, D]."""
        if q.dtype == torch.bfloat16:  # fused: scores stay float32; for float32 it is not faster
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.to(q.dtype), scale=self.scale)
        scores = torch.matmul(q * self.scale, keys.transpose(-1, -2))
        scores += mask
        return torch.matmul(torch.softmax(scores, -1), values)

    def _attend_prompts(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, p: PromptPart, mask: torch.Tensor
    ) -> torch.Tensor:
        padded = q.new_zeros(len(p.rows), p.longest, *q.shape[1:])
        padded[p.row, p.offset] = q
        mixed = F.scaled_dot_product_attention(
            padded.transpose(1, 2),
            keys[:, :, : p.width].index_select(0, p.rows),
            values[:, :, : p.width].index_select(0, p.rows),
            attn_mask=mask.to(q.dtype),
            scale=self.scale,
            enable_gqa=self.config.group > 1,
        )
        return mixed.transpose(1, 2)[p.row, p.offset].view(len(q), -1)


@contextmanager
def exact_bfloat16_products(dtype: torch.dtype) -> Iterator[None]:
    """Let oneDNN compute products of float32 tensors that hold bfloat16 numbers with bfloat16 instructions.

    The products are exact and summed in float32: three times the speed where the CPU has AVX512_BF16 or AMX. No
    effect elsewhere, or unless `dtype` is bfloat16. The setting is of the process, so only one thread may compute.
    """
    precision: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = precision.fp32_precision
    if dtype == torch.bfloat16:
        precision.fp32_precision = "bf16"
    try:
        yield
    finally:
        precision.fp32_precision = before


def rotate(heads: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to [T, heads, D] with adjacent pairs; rotation complex64 [T, 1, D/2]. Keeps the dtype."""
    pairs = heads.float().reshape(*heads.shape[:-1], -1, 2)
    return torch.view_as_real(torch.view_as_complex(pairs) * rotation).flatten(-2).to(heads.dtype)


def rotation_table(rope: Rope, head_dim: int, context: int) -> torch.Tensor:
    """Return e^(i * position * frequency), complex64 [context, D/2]; 1 for elements that are not rotated.

    RoFormer (Su et al. 2021) section 3.2. Llama 3 scaling as in transformers' `_compute_llama3_parameters`.
    """
    inverse = rope.theta ** -(torch.arange(0, rope.width, 2, dtype=torch.int64).float() / rope.width)
    if rope.kind == "linear":
        inverse = inverse / rope.factor
    if rope.kind == "llama3":
        wave = 2 * math.pi / inverse
        low, high = rope.original_length / rope.low_freq_factor, rope.original_length / rope.high_freq_factor
        blend = (rope.original_length / wave - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        middle = (1 - blend) * inverse / rope.factor + blend * inverse
        inverse = torch.where(wave > low, inverse / rope.factor, torch.where(wave < high, inverse, middle))
    angle = torch.arange(context).float()[:, None] * F.pad(inverse, (0, (head_dim - rope.width) // 2))
    return torch.polar(torch.ones_like(angle), angle)
