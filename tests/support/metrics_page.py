"""Checks of every `/metrics` page: help texts, types and units."""

from __future__ import annotations

import re

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from protocol.runtime.metrics import row_of

UNKNOWN = row_of({}, "?")[1].help
SHORT = re.compile(r"_(s|ms|us|mb|gb|kb|min|per_s)(_total)?$")
UNITS = {"Seconds": "seconds", "Bytes": "bytes"}
"""First word of a help text -> unit that the name must end in."""


def check_page(text: str) -> dict[str, Metric]:
    """The families of a page by name; AssertionError where one is not as Prometheus' conventions want it."""
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert families
    seen = [(s.name, tuple(sorted(s.labels.items()))) for family in families.values() for s in family.samples]
    assert len(seen) == len(set(seen)), "a series is there twice"
    for family in families.values():
        check_family(family)
    return families


def check_family(family: Metric) -> None:
    """One of them."""
    name, words = family.name, family.documentation.split()
    assert len(words) >= 3 and words[0][0].isupper() and family.documentation.endswith("."), (name, words)
    assert family.documentation != UNKNOWN, f"{name} is in no table"
    assert family.type in ("counter", "gauge", "histogram"), (name, family.type)
    assert re.fullmatch(r"[a-z_][a-z0-9_]*(:[a-z0-9_]+)?", name) and not SHORT.search(name), name
    assert not name.endswith(("_total", "_created", "_count", "_sum", "_bucket")), name
    ends = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_count", "_sum")}[family.type]
    assert all(sample.name.removeprefix(name) in ends for sample in family.samples), name
    if family.type == "histogram":
        series: dict[tuple[tuple[str, str], ...], set[str]] = {}
        for sample in family.samples:
            labels = tuple(sorted((key, value) for key, value in sample.labels.items() if key != "le"))
            series.setdefault(labels, set()).add(sample.name.removeprefix(name))
        assert all(found == set(ends) for found in series.values()), (name, series)
    if unit := UNITS.get(words[0]):
        assert name.endswith(f"_{unit}"), (name, family.documentation)
