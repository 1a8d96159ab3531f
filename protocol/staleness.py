"""Bounds on the staleness of training data.

The first bound is at issue: a task permits generation, and `issue_limit` limits the number of tasks. The second bound
is at routing, the third at consumption. Example with max_lag 2 and B = 16 groups per step: at the start 48 tasks are
issued; each trained batch settles 16 and allows 16 more; a group issued at step n is trained at step n + 2 at the
latest, if groups are consumed in the order of issue.
"""

from __future__ import annotations

from protocol.versions import PolicyVersion


def lag(now_step: int, token: PolicyVersion) -> int:
    """Return the number of steps between the version that sampled a token and the one being trained, at least 0."""
    return abs(now_step - token.step)


def issue_limit(*, settled: int, watermark: int, max_lag: int, groups_per_step: int) -> int:
    """Return the highest seq that may be issued now (credit gate).

    settled    number of settled seqs in the ledger, with any outcome
    watermark  every seq up to this one is settled

    The second term bounds how far other seqs may run ahead of one straggler, so that the ledger's set stays small. But
    a whole batch may always be open. Otherwise a straggler could wait for other seqs to fill its batch, while those
    wait for the watermark, which only that batch can move. While the straggler is missing, its batch is not full, so
    no batch runs ahead of it.
    """
    window = (max_lag + 1) * groups_per_step
    return min(settled + window, max(watermark + 4 * window, settled + groups_per_step))
