"""Settings: how groups become micro-batches. Imports nothing heavy."""

from __future__ import annotations

from pydantic import Field

from protocol.settings import Settings


class BatchSettings(Settings):
    """How groups become micro-batches."""

    micro_batch_tokens: int = Field(default=4096, ge=1)
    """Most tokens, padding included, in one forward pass; a longer trajectory goes alone. GPUs like many more."""
    row_tokens: int = Field(default=0, ge=0)
    """Trajectories are packed into rows of so many tokens (or of the longest one); 0 = each has a row of its own."""
    shuffle_rewards: bool = False
    """Control experiment: rewards are permuted among all trajectories of the batch before advantages are computed, so
    that there is nothing to learn. The metrics still show the true rewards."""
