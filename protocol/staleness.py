"""How old training data may be: the arithmetic, in one place.

The first bound is at issue: a task is a permission to generate, and there are only so many (`issue_limit`). The
second is at routing, the third at consumption. Example with max_lag 2, B = 16 groups a step: at start 48 tasks are
issued; each trained batch settles 16 and so issues 16 more; a group issued at step n is trained at n + 2 at the
latest, if groups are consumed in the order of their issue.
"""

from __future__ import annotations

from protocol.versions import PolicyVersion


def lag(now_step: int, token: PolicyVersion) -> int:
    """Return the steps between the version that sampled a token and the one being trained; at least 0."""
    return abs(now_step - token.step)


def issue_limit(*, settled: int, watermark: int, max_lag: int, groups_per_step: int) -> int:
    """Return the highest seq that may be issued now (credit gate).

    settled    number of seqs in the ledger, whatever became of them
    watermark  every seq up to here is settled

    The second term bounds how far the rest may run ahead of one straggler, so that the ledger's set stays small. But a
    whole batch may always be open: a straggler that comes at last could otherwise wait for others to fill its batch,
    and they for the watermark, which only its batch can move. While it is missing, that batch is not full, and nothing
    runs ahead of it.
    """
    window = (max_lag + 1) * groups_per_step
    return min(settled + window, max(watermark + 4 * window, settled + groups_per_step))
