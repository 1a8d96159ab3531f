"""The models of a trainer, each in its own engine: policy, critic and reference, over the same packed rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from learner.algorithms.base import Requirements
from learner.config.learner import TrainerSettings
from learner.config.model import OptimSettings
from learner.engine import DeepSpeedEngine
from learner.model.attention import use_varlen
from learner.model.loading import as_saved, load_policy
from learner.model.lora import adapter_only, merged, scale_of
from learner.model.policy import PREFIX
from learner.trainer.critic import Critic, load_critic
from learner.trainer.reference import Reference, build_reference
from protocol.settings import RunSettings

POLICY, CRITIC = "policy", "critic"
"""Folders of a saved state."""


@dataclass
class Models:
    """policy: always; critic, reference: if the algorithm needs them and they are not part of the policy."""

    settings: TrainerSettings
    policy: DeepSpeedEngine
    critic: Critic | None
    reference: Reference | None
    vocabulary: int

    @property
    def device(self) -> torch.device:
        """Return the device for micro-batches."""
        return self.policy.device

    def after_update(self) -> None:
        """Update the reference from the policy if it is due; collective."""
        if self.reference is not None:
            self.reference.after_update(self.policy.updates)

    def iter_published(self, device: str, *, adapters: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (Hugging Face name, a new tensor on `device`) of the weights that engines need; collective.

        adapters  only the adapters of a model, instead of merged weights
        """
        lora = self.settings.model.lora
        weights = self.policy.iter_weights(device)
        causal = ((name.removeprefix(PREFIX), tensor) for name, tensor in weights if name.startswith(PREFIX))
        if lora.rank and adapters:
            yield from adapter_only(causal)
        else:
            plain = merged(causal, scale_of(lora)) if lora.rank else causal
            yield from as_saved(self.policy.module.causal, plain)

    def save(self, directory: Path) -> None:
        """Save every engine's state in its own folder; collective."""
        self.policy.save_state(directory / POLICY)
        if self.critic is not None:
            self.critic.engine.save_state(directory / CRITIC)

    def snapshot(self, directory: Path) -> list[Callable[[], None]]:
        """Copy what `save` writes into main memory; collective. Return the functions that write it."""
        writers = [self.policy.snapshot_state(directory / POLICY)]
        if self.critic is not None:
            writers.append(self.critic.engine.snapshot_state(directory / CRITIC))
        return writers

    def load(self, directory: Path) -> None:
        """Load what `save` wrote; collective."""
        self.policy.load_state(directory / POLICY)
        if self.critic is not None:
            self.critic.engine.load_state(directory / CRITIC)
        if self.reference is not None:
            self.reference.reload()

    def close(self) -> None:
        """Free the engines."""
        if self.critic is not None:
            self.critic.engine.close()
        self.policy.close()


def build_models(run: RunSettings, settings: TrainerSettings, requirements: Requirements, updates: int) -> Models:
    """Return the models of `run`, for this total number of updates; collective.

    The policy's learning rate is planned without those of the critic's warm-up, in which it is not updated.
    """
    torch.manual_seed(run.seed)  # random initial adapters, equal on all ranks and at every start
    rows = settings.batch.rows
    head = settings.critic if requirements.values and settings.critic.backbone == "policy" else None
    sharded = settings.engine.zero_stage == 3
    module = load_policy(run.model, settings.model, **rows, critic=head, sharded=sharded)
    own_critic = requirements.values and head is None
    warmup = settings.critic.warmup_steps * (updates // run.steps) if own_critic else 0
    policy = _engine(module, settings.optim, run, settings, max(1, updates - warmup))
    critic = None
    if own_critic:
        value_model = load_critic(run.model, settings.critic, settings.model, **rows, sharded=sharded)
        engine = _engine(value_model, settings.critic.optim, run, settings, updates)
        critic = Critic(engine, settings.critic, updates_per_step=updates // run.steps)
    reference = None
    if requirements.reference:
        reference = build_reference(settings.reference, run.model, settings.model, policy, **rows)
    if policy.device.type == "cuda":
        use_varlen(module.causal.config, policy.device, getattr(torch, settings.model.fixed_dtype))
    return Models(settings, policy, critic, reference, module.vocabulary)


def _engine(
    module: torch.nn.Module, optim: OptimSettings, run: RunSettings, settings: TrainerSettings, updates: int
) -> DeepSpeedEngine:
    return DeepSpeedEngine(
        module,
        optim=optim,
        engine=settings.engine,
        dtype=settings.model.fixed_dtype,
        total_updates=updates,
        seed=run.seed,
    )
