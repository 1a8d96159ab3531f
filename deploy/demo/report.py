"""The demo's closing table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROWS = (("one-hop", "1hop_"), ("two-hop", "2hop_"), ("mean", ""))


def table(summary: Mapping[str, Any]) -> str:
    """The summary as a person reads it."""
    s = summary
    lines = [
        "",
        f"exact match on {s['questions']} questions about a world never trained on",
        f"{'':10}{'sampled, T=1':>24}{'greedy':>24}",
        f"{'':10}{'before':>12}{'after':>12}{'before':>12}{'after':>12}",
    ]
    for name, key in ROWS:
        cells = [s[f"em_{key}before"], s[f"em_{key}after"], s[f"em_greedy_{key}before"], s[f"em_greedy_{key}after"]]
        lines.append(f"{name:10}" + "".join(f"{cell:12.3f}" for cell in cells))
    lines += [
        "",
        _row("with every search empty", f"{s['em_after_without_search']:.3f}"),
        _row("searches a question", f"{s['searches_before']:.2f} before, {s['searches_after']:.2f} after"),
        _row("steps", f"{s['steps']}, {s['weight_updates']} weight updates loaded by running engines"),
        _row(
            "groups", f"{s['groups_published']} published, {s['groups_trained']} trained, {s['duplicates']} duplicates"
        ),
        _row("lag in steps", f"{s['lag_mean']:.2f} mean, {s['lag_max']:.0f} max"),
        _row("tokens", f"{s['tokens_generated']:,} generated, {s['tokens_trained']:,} trained"),
        _row("seconds", f"{s['seconds']:.0f}: " + ", ".join(f"{k} {v:.0f}" for k, v in s["seconds_by_phase"].items())),
        "",
        f"the same question, before and after: {s['examples']['question']} ({' | '.join(s['examples']['answers'])})",
        f"  before: {_one_line(s['examples']['before'])}",
        f"  after:  {_one_line(s['examples']['after'])}",
    ]
    return "\n".join(lines)


def _row(name: str, text: str) -> str:
    return f"{name:26}{text}"


def _one_line(text: str) -> str:
    return " ".join(text.split())
