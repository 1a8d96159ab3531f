"""Which dtype a machine computes in: what `dtype: auto` stands for. Torch is given, never imported here.

A CPU without bfloat16 instructions multiplies bfloat16 matrices 50 times slower than float32; one with them, 2 to 7
times faster. What the CPU says it can do is confirmed by products of both, which takes under a second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]
DtypeSetting = Literal["auto", "float32", "bfloat16"]

SMALL = 10_000_000
"""Number of parameters below which auto is float32: overhead dominates, and float32 is exact."""
WORTH = 1.2
"""How many times faster bfloat16 products must be to make up for the rounding."""
KEEPS_FLOAT32 = frozenset({"ernie4_5_moe", "hunyuan_v1_moe", "olmo_hybrid"})
"""`model_type`s with weights that stay float32: the learner refuses them in bfloat16 (docs/models.md)."""
SIZE, REPEATS = 256, 5


@dataclass(frozen=True)
class CpuSpeed:
    """GFLOP/s of products in each dtype by one thread. `native`: the CPU has bfloat16 instructions."""

    instructions: str
    native: bool
    float32: float
    bfloat16: float

    @property
    def best(self) -> Dtype:
        """Return what auto stands for."""
        return "bfloat16" if self.native and self.bfloat16 > WORTH * self.float32 else "float32"

    def __str__(self) -> str:
        kind = f"{self.instructions}, with{'' if self.native else 'out'} bfloat16 instructions"
        return f"{kind}; a thread computes {self.float32:.3g} GFLOP/s in float32, {self.bfloat16:.3g} in bfloat16"


def measure(torch: Any) -> CpuSpeed:
    """Measure this CPU: the best of some products, in turn. On a busy machine threads would wait for each other, so
    one computes."""
    native = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    best = {"float32": 0.0, "bfloat16": 0.0}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(REPEATS):
            for name in best:
                matrix = torch.full((SIZE, SIZE), 0.5, dtype=getattr(torch, name))
                began = time.perf_counter()
                matrix @ matrix
                best[name] = max(best[name], 2e-9 * SIZE**3 / (time.perf_counter() - began))
    finally:
        torch.set_num_threads(threads)
    return CpuSpeed(torch.backends.cpu.get_cpu_capability(), bool(native), **best)


def read_facts(model: Path) -> dict[str, Any]:
    """Return the model's config.json, {} if it is missing or not an object."""
    try:
        found = json.loads((model / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def stored_bytes(model: Path) -> int:
    """Return the bytes of one parameter in the files of `model`, by config.json; 4 if it has no dtype."""
    facts = read_facts(model)
    return 2 if (facts.get("dtype") or facts.get("torch_dtype")) in ("bfloat16", "float16") else 4


def stored_parameters(model: Path) -> float:
    """Return the number of parameters in the files of `model`, 0 without any."""
    return sum(path.stat().st_size for path in model.glob("*.safetensors")) / stored_bytes(model)


def known_float32(model: Path) -> bool:
    """Return whether auto is float32 for `model` on every machine: it is small, absent, or keeps weights in float32."""
    return stored_parameters(model) < SMALL or read_facts(model).get("model_type") in KEEPS_FLOAT32


def resolve(
    setting: DtypeSetting, model: Path, warn: Callable[[str], None], torch: Callable[[], Any], *, gpu: bool
) -> Dtype:
    """Return the dtype that `setting` stands for on this machine; warn of a bfloat16 that is slower than float32.

    torch  imports it, where the machine decides
    gpu    whether the process computes on a GPU if there is one
    """
    if setting == "float32" or (setting == "auto" and known_float32(model)):
        return "float32"
    if gpu and torch().cuda.is_available():
        return "bfloat16" if setting == "bfloat16" or torch().cuda.is_bf16_supported() else "float32"
    speed = measure(torch())
    if setting == "auto":
        return speed.best
    if speed.bfloat16 < speed.float32:
        warn(f"dtype bfloat16 is slow on this CPU ({speed}): set dtype: auto")
    return setting
