"""`foray bench serve`: a small run of all its ways."""

from __future__ import annotations

import json

import pytest

from foray.cli import main


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_small_run_has_the_rates_of_all_ways(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["value"] > 0 and report["loop_tokens_per_s"] > 0 and report["baseline"]["tokens_per_s"] > 0
    assert report["tokens"]["alone"] == report["tokens"]["engine"] == 4 * 8
