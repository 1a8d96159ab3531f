"""Versions, orphans, lag and the credit gate."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.staleness import issue_limit, lag
from protocol.versions import PolicyVersion, is_orphan


@given(st.integers(0, 10**8), st.integers(0, 10**11))
def test_a_label_reads_back(epoch: int, step: int) -> None:
    version = PolicyVersion(epoch, step)
    assert PolicyVersion.parse(version.label) == version


def test_foreign_labels_are_none_of_ours() -> None:
    for label in ("default", "", "1", "1.2.3", "-1.2", "1.x", "1." + "9" * 40):
        assert PolicyVersion.parse(label) is None


def test_order_is_epoch_first() -> None:
    assert PolicyVersion(4, 107) < PolicyVersion(5, 90) < PolicyVersion(5, 91)


def test_only_the_abandoned_end_of_a_branch_is_orphaned() -> None:
    lineage = [PolicyVersion(1, 0), PolicyVersion(2, 40)]
    assert not is_orphan(PolicyVersion(1, 40), lineage)
    assert is_orphan(PolicyVersion(1, 41), lineage)
    assert not is_orphan(PolicyVersion(2, 41), lineage)
    assert is_orphan(PolicyVersion(1, 39), [*lineage, PolicyVersion(3, 38)])


def test_lag_is_never_negative() -> None:
    assert lag(5, PolicyVersion(1, 3)) == 2 == lag(3, PolicyVersion(1, 5))


@given(st.integers(0, 500), st.integers(0, 100), st.integers(0, 8), st.integers(1, 64))
def test_credit_is_bounded_by_lag_and_by_the_straggler(watermark: int, above: int, max_lag: int, groups: int) -> None:
    settled = watermark + above
    limit = issue_limit(settled=settled, watermark=watermark, max_lag=max_lag, groups_per_step=groups)
    window = (max_lag + 1) * groups
    assert limit - settled <= window and limit - watermark <= max(4 * window, above + groups)
    assert limit >= min(settled + window, watermark + 4 * window)
    assert limit - settled >= groups, "a whole batch may always be open, or a straggler would wait for ever"
