"""The benchmarks by name: a new one is one file and one line here."""

from __future__ import annotations

from deploy.bench.async_bench import AsyncBench
from deploy.bench.base import BenchSettings
from deploy.bench.engine import EngineBench
from deploy.bench.learner import LearnerBench
from deploy.bench.packing import PackingBench
from deploy.bench.retriever import RetrieverBench
from deploy.bench.retriever_gpu import RetrieverGpuBench
from deploy.bench.rollout import RolloutBench
from deploy.bench.transport import TransportBench
from deploy.bench.weights import WeightsBench

BENCHMARKS: dict[str, type[BenchSettings]] = {
    "async": AsyncBench,
    "engine": EngineBench,
    "learner": LearnerBench,
    "packing": PackingBench,
    "retriever": RetrieverBench,
    "retriever_gpu": RetrieverGpuBench,
    "rollout": RolloutBench,
    "transport": TransportBench,
    "weights": WeightsBench,
}
