"""A few thousand malformed inputs for every decoder, and proof that crashes are counted.

`make fuzz INPUTS=1000000` is the long form.
"""

from __future__ import annotations

from pathlib import Path

import fuzz_targets
import pytest
from fuzz_drive import run_decoders
from fuzz_targets import PARTS

INPUTS = 2000


@pytest.mark.slow
@pytest.mark.fault(30, 31, 37)
@pytest.mark.timeout(300)
def test_no_decoder_raises_anything_but_its_documented_errors(tmp_path: Path) -> None:
    results = run_decoders(INPUTS, 0, keep=tmp_path)
    assert [(r.name, kept) for r in results for kept in r.kept] == []
    assert sum(r.inputs for r in results) >= INPUTS and len(results) >= 55
    # a decoder that takes everything, or nothing, would be fed past what it checks
    refused = {r.name: sum(r.refused.values()) for r in results}
    assert refused["codec.decode"] and refused["entry.read_entry"] and refused["search.search_r1"]
    assert sum(r.accepted for r in results) > INPUTS / 10


@pytest.mark.slow
def test_decoders_that_misbehave_are_found_with_the_input_that_did_it(tmp_path: Path) -> None:
    found = {r.name: r for r in run_decoders(50, 0, parts=["broken"], keep=tmp_path)}
    errors = {name: result.kept[0]["error"] for name, result in found.items() if result.crashes}
    assert set(errors) == {"slow", "greedy", "wrong", "dies"}, "and the correct one is not among them"
    assert "processor time" in errors["slow"] and "more memory" in errors["greedy"]
    assert "KeyError at" in errors["wrong"] and "ended with -11" in errors["dies"]
    assert all(Path(found[name].kept[0]["input"]).read_bytes() == b"x" for name in errors)
    assert found["well"].inputs == 10 and found["well"].refused["ValueError"] > 0


def test_every_decoder_has_a_unique_name() -> None:
    names = [d.name for part in PARTS if part != "native" for d in fuzz_targets.load(part)]
    assert len(names) == len(set(names)) >= 50
