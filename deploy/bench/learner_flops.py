"""Model FLOPs utilisation: the operations that a step needs, over those that a matrix product makes in that time.

Counted is what has to be computed, not what was: padding, recomputation and logits of untrained tokens add nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from deploy.bench.learner import LearnerBench
    from learner.batch import Batch

CEILING_S = 0.5
"""How long matrix products are timed."""


def utilisation(settings: LearnerBench, model: Path, batch: Batch) -> Callable[[float], dict[str, float]]:
    """Seconds of a step -> `tflops` and `mfu` against the machine's own matrix product in the same dtype.

    Per token read 6 operations a parameter of the layers (2 forward, 4 backward), per trained token 6 a parameter of
    the output layer, and 6 * width * s of attention in each layer for the s-th token of a trajectory, which sees s
    others (PaLM, arXiv 2204.02311, appendix B, halved because attention is causal). `mfu_all_logits` counts the
    output layer for every token that is read, as is usual (6 * parameters * tokens).
    """
    shape = json.loads((model / "config.json").read_text())
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    layer = layer_parameters(shape)
    read = sum(int((m.documents >= 0).sum()) for m in batch.micro_batches)
    seen = sum(float(np.where(m.documents >= 0, m.positions + 1, 0).sum()) for m in batch.micro_batches)
    body = 6.0 * layers * layer * read + 12.0 * layers * hidden * seen
    output = 6.0 * settings.vocabulary * hidden
    ceiling = matmul_flops(settings.dtype, settings.threads)

    def figures(seconds: float) -> dict[str, float]:
        needed = (body + output * batch.num_tokens) / seconds
        return {
            "tokens_read_per_s": read / seconds,
            "tflops": needed / 1e12,
            "mfu": needed / ceiling,
            "mfu_all_logits": (body + output * read) / seconds / ceiling,
            "ceiling_tflops": ceiling / 1e12,
        }

    return figures


def layer_parameters(shape: dict[str, int]) -> int:
    """Parameters of the matrix products of one layer of a Qwen2 with that config.json."""
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    shared = shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    return 2 * hidden * hidden + 2 * hidden * shared + 3 * hidden * inner


def head_share(shape: dict[str, int]) -> float:
    """Share of the output layer in the parameters of a forward pass's matrix products: 0.15 in Qwen2.5-1.5B."""
    head = shape["hidden_size"] * shape["vocab_size"]
    return head / (head + shape["num_hidden_layers"] * layer_parameters(shape))


def matmul_flops(dtype: str, threads: int) -> float:
    """Operations a second of a square matrix product in `dtype`: the most that this machine showed."""
    cuda = torch.cuda.is_available()
    torch.set_num_threads(threads)
    size = 8192 if cuda else 1024
    a = torch.randn(size, size, dtype=getattr(torch, dtype), device="cuda" if cuda else "cpu")
    best, end = float("inf"), time.monotonic() + CEILING_S
    while time.monotonic() < end or best == float("inf"):
        begun = time.monotonic()
        a @ a
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.monotonic() - begun)
    return 2.0 * size**3 / best
