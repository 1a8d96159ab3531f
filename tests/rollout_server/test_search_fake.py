"""The searches without a retriever."""

from __future__ import annotations

from rollout_server.search import NoSearchSettings
from tests.support.fake_search import FakeSearchSettings


async def test_canned_passages_and_scripted_failures() -> None:
    search = FakeSearchSettings.model_validate(
        {"passages": {"emma": ['"Emma"\nA novel.']}, "otherwise": ["x\ny", "z\nw"], "failures": ["", "timeout"]}
    ).build()
    found, failed, other = [await search(query) for query in ("emma", "emma", "persuasion")]
    assert [p.title for p in found.passages] == ["Emma"] and found.error == ""
    assert (failed.passages, failed.error) == ((), "timeout")
    assert [p.text for p in other.passages] == ["y", "w"]


async def test_no_search_finds_nothing_and_is_no_failure() -> None:
    result = await NoSearchSettings().build()("emma")
    assert (result.passages, result.error) == ((), "")
