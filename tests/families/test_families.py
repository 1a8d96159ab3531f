"""docs/models.md: every committed row is right or refused, and measuring again gives the same verdicts."""

from __future__ import annotations

import json

import pytest

from tests.families.measure import COLUMNS, EXACT, FAMILIES, NOISIER
from tests.families.report import BEGIN, END, PAGE, measure, results, table

SAMPLE = (
    *("qwen3", "llama dynamic", "phi3 longrope that fits", "gemma2", "gpt_oss", "mixtral window", "olmo3"),
    *("mpt", "bloom", "falcon_mamba", "nemotron_h", "qwen3_next", "llama4_text", "phimoe", "qwen2 fp8"),
)
"""One of each kind: attention, windows, experts, position biases, states, chunks, refusals."""


def test_every_family_is_measured_and_none_is_accepted_and_wrong() -> None:
    rows = results()
    assert list(rows) == list(FAMILIES["families"])
    assert len({row["type"] for row in rows.values()}) >= 60
    for name, row in rows.items():
        assert list(row["cells"]) == list(COLUMNS)
        for column, (verdict, difference, why) in row["cells"].items():
            assert verdict in ("exact", "yes", "refused", "not tried"), (name, column, why)
            limit = NOISIER if column == "bf16" else EXACT
            assert verdict != "exact" or (difference or 0.0) <= limit, (name, column)


def test_the_page_shows_the_results() -> None:
    text = PAGE.read_text()
    assert text[text.index(BEGIN) : text.index(END) + len(END)] == table(results())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_measuring_again_gives_the_committed_verdicts() -> None:
    committed = results()
    for name, row in measure(SAMPLE):
        again, before = (
            {column: (verdict, why) for column, (verdict, _, why) in found["cells"].items()}
            for found in (json.loads(json.dumps(row)), committed[name])
        )
        assert again == before, name
