"""Advantages of trajectories, turns and tokens (pure numpy and torch): one file per family.

Per batch, in numpy float64: `Outcomes` -> one number per trajectory (`group`), credit by turns (`turns`). On tokens,
in torch: returns and GAE over rows [B, T] (`gae`), whitening over the whole batch (`whitening`).
"""

from learner.algorithms.advantages.gae import PaddedRows, discounted_returns, gae, settled_rewards, to_rows
from learner.algorithms.advantages.group import (
    Baseline,
    Spread,
    dr_grpo_advantages,
    gpg_advantages,
    grpo_advantages,
    max_rl_advantages,
    normalized_batch,
    opo_advantages,
    pass_at_k_advantages,
    reinforce_advantages,
    reinforce_pp_baseline_advantages,
    rloo_advantages,
)
from learner.algorithms.advantages.outcomes import Outcomes, informative, overlong
from learner.algorithms.advantages.turns import (
    Turns,
    calibrated_turns,
    normalized_turns,
    turn_advantages,
    turn_of_tokens,
    turn_returns,
)
from learner.algorithms.advantages.whitening import RunningMoments, whiten

__all__ = [
    "Baseline",
    "Outcomes",
    "PaddedRows",
    "RunningMoments",
    "Spread",
    "Turns",
    "calibrated_turns",
    "discounted_returns",
    "dr_grpo_advantages",
    "gae",
    "gpg_advantages",
    "grpo_advantages",
    "informative",
    "max_rl_advantages",
    "normalized_batch",
    "normalized_turns",
    "opo_advantages",
    "overlong",
    "pass_at_k_advantages",
    "reinforce_advantages",
    "reinforce_pp_baseline_advantages",
    "rloo_advantages",
    "settled_rewards",
    "to_rows",
    "turn_advantages",
    "turn_of_tokens",
    "turn_returns",
    "whiten",
]
