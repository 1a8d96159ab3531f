"""`foray bench packing`: the share of tokens in a forward pass that are not padding.

The learner's `build_batch` on a batch of skewed lengths, against padding the same trajectories to the longest of their
micro-batch, with as many trajectories in each: in order of arrival, as a plain loop does, and sorted by length, which
is the best case of padding. Nothing is timed: the shares depend only on the lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from benchmarks.base import BenchResult, Say, Target
from benchmarks.learner.settings import SkewedBatch

if TYPE_CHECKING:
    from learner.data.batch import Batch


class PackingBench(SkewedBatch):
    """Settings of `foray bench packing`."""

    help: ClassVar[str] = "share of tokens that are not padding, against padded batches of the same trajectories"
    quick: ClassVar[dict[str, Any]] = {"groups": 16, "batches": 2}
    targets: ClassVar[tuple[Target, ...]] = (Target("value", 0.95, "share of tokens that are not padding"),)
    modules: ClassVar[tuple[str, ...]] = (
        "learner/data/batch.py",
        "learner/data/packing.py",
        "learner/trainer/reference.py",
        "benchmarks/packing.py",
        "benchmarks/learner/workload.py",
    )

    row_tokens: int = Field(default=8192, ge=1)
    """Tokens per packed row."""
    micro_batch_tokens: int = Field(default=16384, ge=1)
    """Maximum tokens per forward pass."""
    ranks: int = Field(default=8, ge=1)
    """Ranks to distribute trajectories to, for `rank_balance` and `packed_over_ranks`."""
    batches: int = Field(default=8, ge=1)
    """Number of random batches; the figures are means over them, `worst` is the smallest share."""

    def measure(self, say: Say) -> BenchResult:
        """Pack and pad each batch."""
        rows = []
        for number in range(self.batches):
            rows.append(shares(self, number))
            say(", ".join(f"{name} {value:.4f}" for name, value in rows[-1].items()))
        means = {name: fmean(row[name] for row in rows) for name in rows[0]}
        packed = means.pop("packed")
        return BenchResult(
            value=packed,
            unit="share of tokens that are not padding",
            baseline={
                "name": "sorted by length, padded to the longest of the micro-batch",
                "share": means["padded_sorted"],
            },
            ratio=packed / means["padded_sorted"],
            details={
                "worst": min(row["packed"] for row in rows),
                **means,
                "ratio_arrival": packed / means["padded"],
            },
        )


def shares(settings: PackingBench, number: int) -> dict[str, float]:
    """Return the figures of one batch."""
    # one micro-batch per trajectory: its input tokens
    alone = _batch(settings, number, row_tokens=0, micro_batch_tokens=1)
    lengths = {int(m.trajectory[0]): m.ids.size for m in alone.micro_batches}
    arrived = [lengths[i] for i in sorted(lengths)]
    packing = {"row_tokens": settings.row_tokens, "micro_batch_tokens": settings.micro_batch_tokens}
    batch = _batch(settings, number, **packing)
    each = -(-len(arrived) // len(batch.micro_batches))
    divided = _batch(settings, number, **packing, ranks=settings.ranks)
    return {
        "packed": sum(arrived) / sum(m.ids.size for m in batch.micro_batches),
        "padded": padded_share(arrived, each),
        "padded_sorted": padded_share(sorted(arrived), each),
        "padded_whole": padded_share(arrived, len(arrived)),
        "micro_batches": len(batch.micro_batches),
        "trajectories_each": each,
        "trained_share": batch.num_tokens / sum(arrived),
        "longest_over_mean": max(arrived) / fmean(arrived),
        "rank_balance": divided.stats["rank_balance"],
        "packed_over_ranks": 1.0 - divided.stats["padding_share"],
    }


def _batch(settings: PackingBench, number: int, *, row_tokens: int, micro_batch_tokens: int, ranks: int = 1) -> Batch:
    from benchmarks.learner.workload import skewed_groups
    from learner.algorithms import build_algorithm
    from learner.config.algorithm import GrpoSettings
    from learner.config.learner import BatchSettings
    from learner.data.batch import build_batch
    from tests.support.messages import V1

    return build_batch(
        skewed_groups(settings, number),
        build_algorithm(GrpoSettings()),
        now_step=0,
        lineage=[V1],
        max_lag=0,
        settings=BatchSettings(micro_batch_tokens=micro_batch_tokens, row_tokens=row_tokens),
        temperature=1.0,
        ranks=ranks,
    )


def padded_share(lengths: Sequence[int], each: int) -> float:
    """Return the share that is not padding if every `each` trajectories are padded to the longest of them."""
    parts = [lengths[i : i + each] for i in range(0, len(lengths), each)]
    return sum(lengths) / sum(len(part) * max(part) for part in parts)
