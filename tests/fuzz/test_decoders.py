"""A few thousand malformed inputs over every decoder, and proof that whoever counts crashes sees them.

`make fuzz INPUTS=1000000` is the long form.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import fuzz_drive
import fuzz_targets
import pytest
from fuzz_drive import feed, run_decoders
from fuzz_targets import PARTS, Decoder

INPUTS = 6000


@pytest.mark.fault(30, 31, 37)
@pytest.mark.timeout(300)
def test_no_decoder_raises_anything_but_its_documented_errors(tmp_path: Path) -> None:
    results = run_decoders(INPUTS, 0, keep=tmp_path)
    assert [(r.name, kept) for r in results for kept in r.kept] == []
    assert sum(r.inputs for r in results) >= INPUTS - len(results) and len(results) >= 55
    # a decoder that takes everything, or nothing, would be fed past what it checks
    refused = {r.name: sum(r.refused.values()) for r in results}
    assert refused["codec.decode"] and refused["entry.read_entry"] and refused["search.search_r1"]
    assert sum(r.accepted for r in results) > INPUTS / 10


def _slow(raw: bytes) -> None:
    for _ in range(5_000_000 if b"x" in raw else 0):
        pass


def _greedy(raw: bytes) -> int:
    return len(b"y" * (200 << 20)) if b"x" in raw else 0


def _wrong(raw: bytes) -> None:
    if b"x" in raw:
        raise KeyError("undocumented")


@pytest.mark.parametrize(("run", "said"), [(_slow, "processor time"), (_greedy, "more memory"), (_wrong, "KeyError")])
def test_a_decoder_that_misbehaves_is_found_with_the_input_that_did_it(
    run: Callable[[bytes], object], said: str, tmp_path: Path
) -> None:
    mutations = (b"a", b"aa")
    decoder = Decoder("fake", run, (ValueError,), mutations, "text", seal=lambda raw: b"x", cpu_s=0.02, rss_mb=50)
    with mmap.mmap(-1, fuzz_drive.SLOT_BYTES) as slot:
        result = feed(decoder, 10, 0, tmp_path, slot)
    assert result.crashes and said in result.kept[0]["error"]
    assert b"x" in Path(result.kept[0]["input"]).read_bytes()


def test_a_decoder_whose_process_dies_is_found_too(tmp_path: Path) -> None:
    results = run_decoders(20, 0, names=["faiss.flat"], parts=["native"], keep=tmp_path)
    assert [(r.name, r.crashes) for r in results] == [("faiss.flat", 0)], "alone in its fork it may die"
    slot = tmp_path / "slot"
    slot.write_bytes(b"\0" * fuzz_drive.SLOT_BYTES)
    # an input that ends the child: the address space it asks for is beyond the child's limit
    died = fuzz_drive._child("protocol", {"nobody": 1}, 0, tmp_path)
    assert died[0].crashes == 1 and "the process ended" in died[0].kept[0]["error"]


def test_every_part_has_decoders_with_names_of_their_own() -> None:
    names = [d.name for part in PARTS if part != "native" for d in fuzz_targets.load(part)]
    assert len(names) == len(set(names)) >= 50
