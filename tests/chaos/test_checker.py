"""The checker detects modified manifests and journals, and accepts correct ones."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checker
import msgpack
import pytest

LINEAGE = [[1, 0], [2, 4]]
"""The second learner began at step 4: what the first did beyond was rolled back."""
GROUPS = 2


def frame(epoch: int, step: int, seq: int) -> bytes:
    header = msgpack.packb({"seq": seq, "sampled": [5, 7]})
    content = msgpack.packb({"step": step, "epoch": epoch, "h": header, "b": b"body"})
    return checker.FRAME.pack(len(content), zlib.crc32(content)) + content


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Steps 1 to 4 by the first learner, 5 and 6 of it rolled back, 5 to 8 by the second; seq 17 is filtered."""
    first = [frame(1, step, seq) for step in range(1, 7) for seq in (2 * step - 1, 2 * step)]
    second = [frame(2, step, seq) for step in range(5, 9) for seq in (2 * step - 1, 2 * step)]
    folder = tmp_path / "journal"
    folder.mkdir()
    (folder / "groups-00001.bin").write_bytes(b"".join(first))
    (folder / "groups-00002.bin").write_bytes(b"".join(second))
    write_checkpoint(tmp_path, watermark=17, above=[], trained=16, notes=[[17, "filtered", "no_variance"]])
    return tmp_path


def write_checkpoint(run_dir: Path, *, watermark: int, above: list[int], trained: int, notes: list[Any]) -> None:
    path = run_dir / "checkpoints" / "step_8.e2"
    path.mkdir(parents=True, exist_ok=True)
    (path / "state.bin").write_bytes(b"weights")
    counts = {"trained": trained, "filtered": len(notes), "stale": 0, "dead": 0}
    facts = {
        "step": 8,
        "lineage": LINEAGE,
        "ledger": {"watermark": watermark, "above": above, "counts": counts, "notes": notes},
        "tally": {"tokens_sampled": 16 * 12},
        "files": {"state.bin": {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}},
    }
    (path / "manifest.json").write_text(json.dumps(facts))
    (run_dir / "checkpoints" / "CURRENT").write_text("step_8.e2\n")


def add_frames(run_dir: Path, *frames: bytes) -> None:
    with (run_dir / "journal" / "groups-00002.bin").open("ab") as file:
        file.writelines(frames)


def test_a_sound_run_passes_and_what_was_rolled_back_is_no_second_training(run_dir: Path) -> None:
    verdict = checker.check(run_dir, issued=17)
    assert verdict.ok, verdict.render()
    assert (verdict.trained, verdict.rolled_back, verdict.epochs) == (16, 4, 2)


def test_a_seq_that_is_trained_twice_is_seen(run_dir: Path) -> None:
    add_frames(run_dir, frame(2, 8, 3))
    verdict = checker.check(run_dir)
    assert verdict.twice == [3] and not verdict.ok


def test_a_seq_that_is_found_nowhere_is_seen(run_dir: Path) -> None:
    assert checker.check(run_dir, issued=20).missing == [18, 19, 20]
    write_checkpoint(run_dir, watermark=17, above=[], trained=16, notes=[])
    verdict = checker.check(run_dir)
    assert verdict.missing == [17] and not verdict.ok


def test_filtered_seqs_are_only_counted(run_dir: Path) -> None:
    path = run_dir / "checkpoints" / "step_8.e2" / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["ledger"] |= {"notes": [], "filtered": {"no_variance": 1}}
    path.write_text(json.dumps(manifest))
    verdict = checker.check(run_dir, issued=17)
    assert verdict.ok and verdict.by_reason == {"filtered (no_variance)": 1}, verdict.render()
    manifest["ledger"] |= {"watermark": 18, "counts": manifest["ledger"]["counts"] | {"dead": 1}}
    path.write_text(json.dumps(manifest))
    assert checker.check(run_dir).missing == [17, 18], "one of them has no outcome"
    manifest["ledger"] |= {"filtered": {"no_variance": 2}}
    path.write_text(json.dumps(manifest))
    assert "recorded as filtered" in checker.check(run_dir).problems[0]


def test_a_hole_below_settled_seqs_is_seen(run_dir: Path) -> None:
    add_frames(run_dir, frame(2, 8, 19))
    write_checkpoint(run_dir, watermark=17, above=[19], trained=17, notes=[[17, "filtered", "no_variance"]])
    assert checker.check(run_dir).missing == [18]


def break_counts(manifest: dict[str, Any]) -> None:
    manifest["ledger"]["counts"]["trained"] += 1


def book_the_masked(manifest: dict[str, Any]) -> None:
    manifest["ledger"]["notes"] = []
    manifest["ledger"]["counts"] = {"trained": 17}


def note_the_trained(manifest: dict[str, Any]) -> None:
    manifest["ledger"]["notes"].append([3, "dead", "poison"])


def lose_tokens(manifest: dict[str, Any]) -> None:
    manifest["tally"]["tokens_sampled"] -= 1


@pytest.mark.parametrize("doctor", [break_counts, book_the_masked, note_the_trained, lose_tokens])
def test_inconsistent_accounting_is_detected(run_dir: Path, doctor: Callable[[dict[str, Any]], None]) -> None:
    path = run_dir / "checkpoints" / "step_8.e2" / "manifest.json"
    manifest = json.loads(path.read_text())
    doctor(manifest)
    path.write_text(json.dumps(manifest))
    verdict = checker.check(run_dir)
    assert verdict.problems and not verdict.ok


def test_a_damaged_checkpoint_is_seen_unless_it_was_damaged_on_purpose(run_dir: Path) -> None:
    (run_dir / "checkpoints" / "step_8.e2" / "state.bin").write_bytes(b"wEights")
    assert "state.bin" in checker.check(run_dir).problems[0]
    assert checker.check(run_dir, spoiled={"step_8.e2"}).ok


def test_a_file_that_a_crash_cut_short_costs_its_last_frame_only(run_dir: Path) -> None:
    path = run_dir / "journal" / "groups-00001.bin"
    path.write_bytes(path.read_bytes()[:-3])
    verdict = checker.check(run_dir)
    assert verdict.torn_files == ["groups-00001.bin"] and verdict.rolled_back == 3 and verdict.ok


def test_the_judge_shares_no_code_with_the_learner() -> None:
    program = "import sys, checker; print([m for m in sys.modules if m.split('.')[0] in ('learner', 'protocol')])"
    folder = Path(checker.__file__).parent
    done = subprocess.run([sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
