"""Advantages of trajectories, turns and tokens (pure numpy and torch): one file per family.

Per batch, in numpy float64: `Outcomes` -> one number per trajectory (`group`), credit by turns (`turns`). On tokens,
in torch: returns and GAE over rows [B, T] (`gae`), whitening over the whole batch (`whitening`).
"""
