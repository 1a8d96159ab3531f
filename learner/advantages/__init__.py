"""What a trajectory or a token was worth (pure numpy and torch): one file a family."""

from learner.advantages.groups import grpo_advantages, rloo_advantages
from learner.advantages.outcomes import Outcomes

__all__ = ["Outcomes", "grpo_advantages", "rloo_advantages"]
