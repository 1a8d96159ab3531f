"""Published results, to show beside a report. Numbers only with their source.

All are exact match in percent as printed there; `None` is not reported. Protocols differ from a report's (retriever,
passages, lengths, sampling), so they are context and not a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass

SEARCH_R1 = (
    "Search-R1, arXiv:2503.09516 v5, tables 2 and 3, as quoted by three independent repositories; E5, wiki-18, 3 "
    "passages; scored on sampled answers"
)
RESEARCH = "ReSearch, arXiv:2503.19470, table 2, from the paper's text in a public repository; 5 passages, greedy"


@dataclass(frozen=True)
class PublishedRow:
    """Exact match by data set, in percent."""

    system: str
    values: dict[str, float]
    source: str


def _row(system: str, *values: float) -> PublishedRow:
    names = ("nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    return PublishedRow(system, dict(zip(names, values, strict=True)), SEARCH_R1)


def _research(system: str, *values: float) -> PublishedRow:
    names = ("hotpotqa", "2wikimultihopqa", "musique", "bamboogle")
    return PublishedRow(system, dict(zip(names, values, strict=True)), RESEARCH)


ROWS: tuple[PublishedRow, ...] = (
    _row("Search-R1 Qwen2.5-7B base, PPO", 48.0, 63.8, 45.7, 43.3, 38.2, 19.6, 43.2),
    _row("Search-R1 Qwen2.5-7B base, GRPO", 39.5, 56.0, 38.8, 32.6, 29.7, 12.5, 36.0),
    _row("Search-R1 Qwen2.5-7B instruct, PPO", 39.3, 61.0, 39.7, 37.0, 41.4, 14.6, 36.8),
    _row("Search-R1 Qwen2.5-7B instruct, GRPO", 42.9, 62.3, 42.7, 38.6, 34.6, 16.2, 40.0),
    _row("Search-R1 Qwen2.5-3B base, PPO", 40.6, 58.7, 43.5, 28.4, 27.3, 4.9, 8.8),
    _row("Search-R1 Qwen2.5-3B base, GRPO", 42.1, 58.3, 41.3, 29.7, 27.4, 6.6, 12.8),
    _row("Search-R1 Qwen2.5-3B instruct, PPO", 34.1, 54.5, 37.8, 32.4, 31.9, 10.3, 26.4),
    _row("Search-R1 Qwen2.5-3B instruct, GRPO", 39.7, 56.5, 39.1, 33.1, 31.0, 12.4, 23.2),
    _row("Search-R1's RAG, Qwen2.5-7B", 34.9, 58.5, 39.2, 29.9, 23.5, 5.8, 20.8),
    _row("Search-R1's rejection sampling, Qwen2.5-7B", 36.0, 59.2, 38.0, 33.1, 29.6, 12.3, 35.5),
    _research("ReSearch Qwen2.5-7B", 40.57, 44.67, 21.68, 43.20),
    _research("ReSearch Qwen2.5-7B-Instruct", 43.52, 47.59, 22.30, 42.40),
    _research("ReSearch Qwen2.5-32B", 42.77, 38.52, 26.40, 54.40),
    _research("ReSearch Qwen2.5-32B-Instruct", 46.73, 44.90, 26.40, 56.80),
    _research("ReSearch's IRCoT, 7B", 30.33, 21.57, 6.99, 24.80),
    _research("ReSearch's Iter-RetGen, 7B", 34.36, 27.92, 8.69, 21.60),
    _research("ReSearch's naive RAG, 7B", 31.90, 25.78, 6.21, 20.80),
    _research("ReSearch's direct answers, 7B", 19.18, 25.76, 3.76, 10.40),
)


def rows_for(data_sets: frozenset[str]) -> tuple[PublishedRow, ...]:
    """Return the published rows that have one of the data sets."""
    return tuple(row for row in ROWS if data_sets & row.values.keys())
