"""`foray bench retriever_gpu`: exact search on one GPU, queries/s by batch size, against the limits of the GPU.

Random float16 vectors of the size of Wikipedia (21 million of 768) are in GPU memory, 32 GB. The scan of the index
`torch_flat` multiplies a batch of queries with them block by block, keeping the best of every block. Small batches are
bound by reading the matrix once, large batches by arithmetic. Both bounds are measured on this GPU in the same run: the
bandwidth of a copy, and the rate of a large matrix product. Ratio: the bound over the measured time, for the largest
batch; the table has the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator

from benchmarks.base import BenchResult, BenchSettings, Say
from protocol.errors import UserError

if TYPE_CHECKING:
    import torch

HALF = 2
"""Bytes of a float16."""


class RetrieverGpuBench(BenchSettings):
    """Sizes."""

    help: ClassVar[str] = "exact float16 search on one GPU against its bandwidth and arithmetic"
    quick: ClassVar[dict[str, Any]] = {"passages": 1_000_000, "rounds": 2}
    modules: ClassVar[tuple[str, ...]] = ("benchmarks/retriever/gpu.py", "retriever/index/torch_flat.py")

    passages: int = Field(default=21_000_000, ge=1)
    """Vectors."""
    dim: int = Field(default=768, ge=1)
    """Dimension of a vector."""
    candidates: int = Field(default=3 + 128, ge=1)
    """Vectors found per query: three hits and the default of `spare`."""
    batches: tuple[int, ...] = Field(default=(1, 8, 64, 512, 2560), min_length=1)
    """Batch sizes: 1,8,64."""
    temp_mb: int = Field(default=512, ge=1)
    """Scratch memory of the scan, in MiB."""
    rounds: int = Field(default=5, ge=1)
    """Number of rounds, of which the fastest counts, after one warm-up round."""

    @field_validator("batches", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return value.split(",") if isinstance(value, str) else value

    def measure(self, say: Say) -> BenchResult:
        """Run the benchmark. Raises UserError without a GPU, or if its memory is too small."""
        import torch

        from retriever.index.torch_flat import scan

        need = self.passages * self.dim * HALF + (self.temp_mb << 20)
        _refuse(need)
        device = torch.device("cuda")
        bandwidth, rate = _bandwidth(device, self.rounds), _rate(device, self.rounds)
        say(f"copy {bandwidth / 1e9:.0f} GB/s, product {rate / 1e12:.0f} TFLOP/s")
        vectors = torch.empty((self.passages, self.dim), dtype=torch.float16, device=device)
        for start in range(0, self.passages, 1 << 20):
            vectors[start : start + (1 << 20)].normal_()
        rows_by_batch = []
        for batch in self.batches:
            queries = torch.randn((batch, self.dim), dtype=torch.float16, device=device)
            seconds = _fastest(lambda: scan(vectors, queries, self.candidates, self.temp_mb << 17), self.rounds)  # noqa: B023
            bound = bound_s(self.passages, self.dim, batch, bandwidth, rate)
            rows_by_batch.append(
                {"batch": batch, "queries_per_s": batch / seconds, "ms": 1000 * seconds, "bound_ms": 1000 * bound}
                | {"of_bound": bound / seconds}
            )
            say(f"batches of {batch}: {batch / seconds:.0f} queries/s, {bound / seconds:.0%} of the bound")
        last = rows_by_batch[-1]
        return BenchResult(
            value=last["queries_per_s"],
            unit="queries/s",
            baseline={
                "name": "the GPU's own bandwidth and arithmetic",
                "bytes_per_s": bandwidth,
                "flop_per_s": rate,
                "queries_per_s": 1000 * last["batch"] / last["bound_ms"],
            },
            ratio=last["of_bound"],
            details={"by_batch": rows_by_batch, "gpu": torch.cuda.get_device_name(), "vector_bytes": need},
        )


def bound_s(passages: int, dim: int, batch: int, bytes_per_s: float, flop_per_s: float) -> float:
    """Return the minimum seconds per batch: each float16 vector is read once, each pair takes 2 * dim operations.

    The roofline of Williams, Waterman and Patterson (2009); reading queries and writing scores are ignored.
    """
    return max(passages * dim * HALF / bytes_per_s, 2 * passages * dim * batch / flop_per_s)


def _refuse(need: int) -> None:
    import torch

    if not torch.cuda.is_available():
        raise UserError(
            "no GPU found", why="this benchmark measures a GPU", todo="run it on a machine with a CUDA device"
        )
    free, _ = torch.cuda.mem_get_info()
    if need > free:
        raise UserError(
            f"the benchmark needs {need / 1e9:.0f} GB of GPU memory, {free / 1e9:.0f} GB are free",
            todo="use fewer --passages, or a smaller --temp-mb",
        )


def _fastest(work: Callable[[], object], rounds: int) -> float:
    """Return the seconds of the fastest of `rounds`, after one warm-up round."""
    import torch

    seen = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        seen.append(time.perf_counter() - begun)
    return min(seen[1:])


def _bandwidth(device: torch.device, rounds: int) -> float:
    """Return the bytes/s of a copy, counting both reads and writes."""
    import torch

    source = torch.ones(1 << 30, dtype=torch.float16, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * HALF / _fastest(lambda: target.copy_(source), rounds)


def _rate(device: torch.device, rounds: int) -> float:
    """Return the operations/s of a float16 matrix product of 8192 x 8192."""
    import torch

    matrix = torch.randn((8192, 8192), dtype=torch.float16, device=device)
    return 2 * 8192**3 / _fastest(lambda: matrix @ matrix, rounds)
