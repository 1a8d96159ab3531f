"""The answer cache: least recently used first out, never above its bytes."""

from __future__ import annotations

from retriever.backends.base import QueryResult
from retriever.serving.service import CacheKey, ResultCache

ANSWER = QueryResult((b"x" * 1000,), (1.0,))


def key(name: str) -> CacheKey:
    return CacheKey(name, 3, "f")


def test_the_least_recently_used_answer_goes_first() -> None:
    cache = ResultCache(3 * 1600)
    for name in "abc":
        cache.put(key(name), ANSWER)
    assert cache.get(key("a")) == ANSWER
    cache.put(key("d"), ANSWER)
    assert [name for name in "abcd" if cache.get(key(name)) is not None] == ["a", "c", "d"]


def test_the_size_stays_below_the_limit_and_returns_to_the_same_value() -> None:
    cache = ResultCache(10_000)
    sizes = []
    for i in range(500):
        cache.put(key(f"q{i % 37:02}"), ANSWER)
        sizes.append(cache.num_bytes)
    assert max(sizes) <= 10_000
    assert sizes[-1] == len(cache) * sizes[0]


def test_an_answer_larger_than_the_cache_is_not_kept_and_evicts_nothing() -> None:
    cache = ResultCache(2000)
    cache.put(key("a"), ANSWER)
    cache.put(key("b"), QueryResult((b"x" * 3000,), (1.0,)))
    assert cache.get(key("b")) is None
    assert cache.get(key("a")) == ANSWER


def test_other_k_and_other_indexes_have_other_answers() -> None:
    cache = ResultCache(10_000)
    cache.put(CacheKey("q", 3, "f"), ANSWER)
    assert cache.get(CacheKey("q", 4, "f")) is None
    assert cache.get(CacheKey("q", 3, "g")) is None


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    cache = ResultCache(0)
    cache.put(key("a"), ANSWER)
    assert len(cache) == 0
