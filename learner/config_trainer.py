"""Settings of the computing half of the learner, put together. Imports nothing heavy."""

from __future__ import annotations

from pydantic import model_validator

from learner.config_algorithm import AlgorithmSettings, GrpoSettings
from learner.config_batch import BatchSettings
from learner.config_engine import EngineSettings, OptimSettings
from learner.config_model import CriticSettings, ModelSettings, ReferenceSettings
from protocol.settings import Settings


class TrainerSettings(Settings):
    """All of the above: base class of the learner's section."""

    algorithm: AlgorithmSettings = GrpoSettings()
    """What is minimised."""
    batch: BatchSettings = BatchSettings()
    """How groups are packed."""
    optim: OptimSettings = OptimSettings()
    """How weights move."""
    model: ModelSettings = ModelSettings()
    """How the policy is computed."""
    critic: CriticSettings = CriticSettings()
    """What the policy's outcomes are held against, in algorithms that need values."""
    reference: ReferenceSettings = ReferenceSettings()
    """What the policy must not stray from, in algorithms with a divergence."""
    engine: EngineSettings = EngineSettings()
    """How it is distributed."""

    @model_validator(mode="after")
    def _bfloat16_needs_zero(self) -> TrainerSettings:
        # DeepSpeed's stage 0 silently takes an optimiser of another kind for bfloat16.
        if self.model.dtype == "bfloat16" and self.engine.zero_stage == 0:
            raise ValueError("model.dtype bfloat16 needs engine.zero_stage 1, 2 or 3")
        return self

    @model_validator(mode="after")
    def _distillation_needs_a_teacher(self) -> TrainerSettings:
        if self.algorithm.type == "distill" and self.reference.model is None:
            raise ValueError("algorithm distill needs a teacher: set reference.model to the directory of its model")
        return self
