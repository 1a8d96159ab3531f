"""The searches without a retriever."""

from __future__ import annotations

from protocol.search import Passage
from rollout_server.search import build_search
from rollout_server.search.base import NoSearchSettings
from tests.support.fake_search import FakeSearch


async def test_canned_passages_and_scripted_failures() -> None:
    others = [Passage(contents="x\ny"), Passage(contents="z\nw")]
    search = FakeSearch({"emma": [Passage(contents='"Emma"\nA novel.')]}, otherwise=others, failures=["", "timeout"])
    found, failed, other = [await search(query) for query in ("emma", "emma", "persuasion")]
    assert [p.title for p in found.passages] == ["Emma"] and found.error == ""
    assert (failed.passages, failed.error) == ((), "timeout")
    assert [p.text for p in other.passages] == ["y", "w"]


async def test_no_search_finds_nothing_and_is_no_failure() -> None:
    result = await build_search(NoSearchSettings())("emma")
    assert (result.passages, result.error) == ((), "")
