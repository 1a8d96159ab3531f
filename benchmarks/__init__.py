"""Benchmarks: each compares one figure of Foray with a baseline on the same machine in the same run."""

from __future__ import annotations

from benchmarks.agents import AgentsBench
from benchmarks.asynchrony import AsyncBench
from benchmarks.base import BenchSettings
from benchmarks.dashboard import DashboardBench
from benchmarks.engine import EngineBench
from benchmarks.learner.settings import LearnerBench
from benchmarks.packing import PackingBench
from benchmarks.retriever.gpu import RetrieverGpuBench
from benchmarks.retriever.settings import RetrieverBench
from benchmarks.rollout.bench import RolloutBench
from benchmarks.rollout.scale import RolloutScaleBench
from benchmarks.serve import ServeBench
from benchmarks.small_lm import SmallLmBench
from benchmarks.transfer import TransferBench
from benchmarks.transport.settings import TransportBench
from benchmarks.weights import WeightsBench

BENCHMARKS: dict[str, type[BenchSettings]] = {
    "agents": AgentsBench,
    "async": AsyncBench,
    "dashboard": DashboardBench,
    "engine": EngineBench,
    "learner": LearnerBench,
    "packing": PackingBench,
    "retriever": RetrieverBench,
    "retriever_gpu": RetrieverGpuBench,
    "rollout": RolloutBench,
    "rollout_scale": RolloutScaleBench,
    "serve": ServeBench,
    "small_lm": SmallLmBench,
    "transfer": TransferBench,
    "transport": TransportBench,
    "weights": WeightsBench,
}
"""The benchmarks by name. To add one, write a file with its settings class, and add a line here."""
