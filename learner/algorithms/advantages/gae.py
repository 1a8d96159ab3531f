"""Credit over time within a trajectory (pure torch): discounted returns and generalised advantage estimation.

Rows are [B, T] with a mask that is True at the policy's tokens. The mask may have holes, where the observations are.
Time counts the policy's tokens only: the recursion skips a hole, so a hole neither discounts nor adds, as in
verl >= 0.9 and AReaL. (OpenRLHF discounts through holes, with values of 0 in them; slime and Search-R1 ignore the mask
and use the critic's values of observations; older verl lost every reward beyond a hole. With gamma = lambda = 1 the
first two agree.) Values at masked positions have no effect, even NaN, with one exception: finite rewards
(`settled_rewards`). Results are constants (no gradient), computed in float64, returned in the dtype given, and
exactly 0 where the mask is False (verl leaves carried values there).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def settled_rewards(rewards: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [B, T] rewards in which each masked position's reward is added to the last token before it that `mask`
    keeps.

    verl loses such a reward (a trajectory cut off right after an observation). With no such token before it, the reward
    goes to the row's first kept token, so the rewards of a row keep their sum, as they do in a batch, which has trained
    tokens only. A row without kept tokens stays 0. Non-finite values at masked positions count as 0.
    """
    given = torch.where(mask | rewards.isfinite(), rewards, 0.0).detach()
    if not mask.shape[1]:
        return given
    place = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    before = torch.where(mask, place, -1).cummax(1).values
    first = torch.where(mask, place, mask.shape[1] - 1).amin(1, keepdim=True)
    return torch.where(mask, torch.zeros_like(given).scatter_add(1, torch.where(before < 0, first, before), given), 0.0)


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, gamma: float) -> torch.Tensor:
    """Return [B, T]: G_t = r_t + gamma * G of the row's next token where `mask` holds (see the module for holes).

    rewards [B, T], mask [B, T] bool. With the KL penalty already in the rewards, and whitened over the batch, these are
    the advantages of REINFORCE++ (arXiv 2501.03262).
    """
    settled = settled_rewards(rewards.double(), mask)
    carried = settled.new_zeros(len(settled))
    out = torch.zeros_like(settled)
    for t in reversed(range(settled.shape[1])):
        carried = torch.where(mask[:, t], settled[:, t] + gamma * carried, carried)
        out[:, t] = carried
    return torch.where(mask, out, 0.0).to(rewards.dtype)


def gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    gamma: float,
    lam: float,
    last_value: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages [B, T], not whitened, and returns [B, T] = advantages + values (GAE, arXiv 1506.02438, equation
    16).

    delta_t = r_t + gamma * V_next - V_t and A_t = delta_t + gamma * lam * A_next, `next` being the row's next token
    where the mask holds.

    rewards     [B, T]; those at masked positions are moved (`settled_rewards`)
    values      [B, T] of the critic, in the dtype of the results, before the token is sampled
    mask        [B, T] bool
    last_value  [B] the critic's value after the last token, for a truncated trajectory; default 0
    """
    settled = settled_rewards(rewards.double(), mask)
    known = torch.where(mask, values, 0.0).detach().double()
    carried = settled.new_zeros(len(settled))
    ahead = carried if last_value is None else last_value.detach().double()
    out = torch.zeros_like(settled)
    for t in reversed(range(settled.shape[1])):
        delta = settled[:, t] + gamma * ahead - known[:, t]
        carried = torch.where(mask[:, t], delta + gamma * lam * carried, carried)
        ahead = torch.where(mask[:, t], known[:, t], ahead)
        out[:, t] = carried
    advantages = torch.where(mask, out, 0.0)
    return advantages.to(values.dtype), (advantages + known).to(values.dtype)


@dataclass(frozen=True)
class PaddedRows:
    """Positions of N flat tokens in B rows of T tokens: one row per trajectory, T the longest.

    ids     [B] int64, the trajectory of each row, in order of appearance
    row     [N] int64
    column  [N] int64
    mask    [B, T] bool, False where a row is padded at its end; there are no holes
    """

    ids: torch.Tensor
    row: torch.Tensor
    column: torch.Tensor
    mask: torch.Tensor

    def pad(self, flat: torch.Tensor, fill: float = 0.0) -> torch.Tensor:
        """Return [B, T] in the dtype of `flat` [N], `fill` where a row is padded; gradients pass."""
        padded = torch.full(self.mask.shape, fill, dtype=flat.dtype, device=flat.device)
        return padded.index_put((self.row, self.column), flat)

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        """Return [N] from [B, T], or [N, ...] from [B, T, ...]; gradients pass."""
        return padded[self.row, self.column]

    def last(self) -> torch.Tensor:
        """Return [B] int64: the flat position of the last token of each row."""
        return self.mask.sum(1).cumsum(0) - 1


def to_rows(trajectory: torch.Tensor) -> PaddedRows:
    """Return the rows of flat tokens from each token's trajectory number [N] int64.

    The tokens of a trajectory must be contiguous and in order; the numbers are arbitrary. Observations are not among
    the N, so the holes of a multi-turn trajectory vanish: neighbours in a row are neighbours among the trained tokens.
    N = 0 gives B = T = 0. Raises ValueError if the tokens of a trajectory are not contiguous.
    """
    ids, row, counts = torch.unique_consecutive(trajectory, return_inverse=True, return_counts=True)
    if len(torch.unique(ids)) != len(ids):
        raise ValueError("the tokens of a trajectory are not contiguous")
    column = torch.arange(len(trajectory), device=trajectory.device) - (counts.cumsum(0) - counts)[row]
    longest = int(counts.max()) if len(counts) else 0
    mask = torch.arange(longest, device=trajectory.device)[None, :] < counts[:, None]
    return PaddedRows(ids, row, column, mask)
