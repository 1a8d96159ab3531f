"""Everything that is computed of a share before the first update: no gradient, micro-batch by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from learner.algorithms.base import Algorithm, Judgement, Needs, Scored
from learner.data.batch import MicroBatch, Share

if TYPE_CHECKING:
    from learner.trainer.critic import Critic
    from learner.trainer.models import Models


@dataclass(frozen=True)
class Tensors:
    """A micro-batch on the device; fields as in `MicroBatch`. documents: None where no row holds two trajectories."""

    ids: torch.Tensor
    positions: torch.Tensor
    documents: torch.Tensor | None
    index: torch.Tensor
    targets: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    weights: torch.Tensor
    rewards: torch.Tensor
    outcome: torch.Tensor
    lags: torch.Tensor
    trajectory: torch.Tensor
    turn: torch.Tensor
    end: torch.Tensor
    mask: torch.Tensor
    temperature: float

    @classmethod
    def of(cls, micro_batch: MicroBatch, temperature: float, device: torch.device) -> Tensors:
        """The arrays as tensors."""
        moved = {
            name: torch.from_numpy(getattr(micro_batch, name)).to(device) for name in MicroBatch.__dataclass_fields__
        }
        packed = int(micro_batch.documents.max()) > 0
        documents = moved.pop("documents") if packed else None
        moved.pop("documents", None)
        return cls(**moved, documents=documents, mask=moved["weights"] > 0, temperature=temperature)

    @property
    def with_ends(self) -> Tensors:
        """The same with the states after truncated trajectories behind those of the N tokens in `index`; their
        `targets` are token 0, which no score is asked of.
        """
        states = torch.unique(self.end[self.end >= 0])
        targets = torch.cat([self.targets, torch.zeros_like(states)])
        return replace(self, index=torch.cat([self.index, states]), targets=targets)

    def split_ends(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([N] values of the tokens, [N] of the state after each one's trajectory, 0 where none was asked for), of the
        values of `with_ends`.
        """
        known = self.end >= 0
        which = torch.unique(self.end[known], return_inverse=True)[1]
        own, after = values[: len(self.index)], values[len(self.index) :]
        last = torch.zeros_like(own)
        last[known] = after[which]
        return own, last

    @property
    def read(self) -> tuple[Any, ...]:
        """What a model's forward pass takes first."""
        return self.ids, self.positions, self.documents, self.index

    @property
    def scored(self) -> tuple[Any, ...]:
        """What a policy's forward pass takes, up to the gradient of the entropy."""
        return *self.read, self.targets, self.temperature


@dataclass(frozen=True)
class Prepared:
    """One micro-batch and what was found of it. Fields as in `Scored` and `TopTokens`; top [N, k] int64."""

    tensors: Tensors
    old: torch.Tensor | None = None
    values: torch.Tensor | None = None
    last_values: torch.Tensor | None = None
    reference: torch.Tensor | None = None
    top: torch.Tensor | None = None
    reference_top: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @property
    def scored(self) -> Scored:
        """For the algorithm's judgement."""
        t = self.tensors
        return Scored(
            rewards=t.rewards,
            advantages=t.advantages,
            behaviour=t.behaviour,
            old=self.old,
            reference=self.reference,
            values=self.values,
            last_values=self.last_values,
            mask=t.mask,
            trajectory=t.trajectory,
            turn=t.turn,
        )


@dataclass(frozen=True)
class ScoredShare:
    """The parts of a share, prepared."""

    parts: tuple[tuple[Prepared, ...], ...]

    @property
    def flat(self) -> list[Scored]:
        """Every micro-batch, in order."""
        return [prepared.scored for part in self.parts for prepared in part]

    def with_judgements(self, judged: Sequence[Judgement]) -> ScoredShare:
        """The same with advantages and returns, one judgement for each of `flat`."""
        given = iter(judged)
        return ScoredShare(tuple(tuple(_judge(prepared, next(given)) for prepared in part) for part in self.parts))


def _judge(prepared: Prepared, judgement: Judgement) -> Prepared:
    return replace(prepared, advantages=judgement.advantages, returns=judgement.returns)


def score_share(share: Share, models: Models, algorithm: Algorithm) -> ScoredShare:
    """Scores of every micro-batch by whoever the algorithm needs; collective at ZeRO stage 3.

    One model after the other over the whole share, so that a model may leave the device while it is not used.
    """
    needs = algorithm.needs
    parts = [[Prepared(Tensors.of(m, share.temperature, models.device)) for m in part] for part in share.parts]
    if _policy_is_asked(needs, models, updates=algorithm.epochs * len(parts)):
        parts = [[_by_policy(p, models, needs) for p in part] for part in parts]
    if models.critic is not None:
        parts = [[_by_critic(p, models.critic) for p in part] for part in parts]
    if models.reference is not None:
        models.reference.wake()
        parts = [[_by_reference(p, models, needs) for p in part] for part in parts]
        models.reference.sleep()
    return ScoredShare(tuple(tuple(part) for part in parts))


def _policy_is_asked(needs: Needs, models: Models, *, updates: int) -> bool:
    # With a single update the proximal policy is what the update's own forward pass says, cut off from the gradient.
    heads = needs.values and models.critic is None
    return (needs.old and updates > 1) or needs.old_to_judge or heads or (needs.top > 0 and needs.top_of == "policy")


@torch.no_grad()
def _by_policy(prepared: Prepared, models: Models, needs: Needs) -> Prepared:
    t, top = prepared.tensors, needs.top if needs.top_of == "policy" else 0
    if not needs.values or models.critic is not None:
        scores = models.policy.forward(*t.scored, False, top)
        return replace(prepared, old=scores.logprobs, top=scores.top)
    scores, n = models.policy.forward(*t.with_ends.scored, False, top), len(t.index)
    values, last = t.split_ends(scores.values)
    likeliest = None if scores.top is None else scores.top[:n]
    return replace(prepared, old=scores.logprobs[:n], top=likeliest, values=values, last_values=last)


def _by_critic(prepared: Prepared, critic: Critic) -> Prepared:
    t = prepared.tensors
    values, last = t.split_ends(critic.values(*t.with_ends.read))
    return replace(prepared, values=values, last_values=last)


def _by_reference(prepared: Prepared, models: Models, needs: Needs) -> Prepared:
    assert models.reference is not None
    top = needs.top if needs.top_of == "reference" else 0
    scores = models.reference.scores(*prepared.tensors.scored, False, top=top, at_ids=prepared.top)
    chosen = scores.top if top else prepared.top
    return replace(prepared, reference=scores.logprobs, top=chosen, reference_top=scores.at)
