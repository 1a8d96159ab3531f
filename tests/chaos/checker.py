"""Check a run from its files alone: no seq trained twice, none missing, accounting consistent.

It reads the manifest of the current checkpoint and the journal's frames with its own parser, and shares no code with
the learner, so that it does not share a bug in the accounting. The formats:

    checkpoints/CURRENT          the name of a folder; its manifest.json has `lineage` [[epoch, first step], ...],
                                 `step`, `ledger` {watermark, above, counts, notes [[seq, outcome, reason], ...],
                                 filtered {reason: number of seqs without a note}},
                                 `tally`, `files` {name: {bytes, sha256}}
    journal/groups-NNNNN.bin     frames: u32 length, u32 CRC-32, msgpack {step, epoch, h: msgpack {seq, sampled, ...}}

A journalled step survives when its epoch is in the lineage and no later learner began below it.
`python checker.py RUN_DIR [--issued N] [--json]`; exit status 1 if the run is not consistent.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgpack

FRAME = struct.Struct("<II")
SHOWN = 12


@dataclass
class Verdict:
    """Findings in the files. Every list must be empty for `ok`.

    twice       seqs trained twice in the lineage that survives
    missing     seqs up to `issued` that were neither trained nor recorded with a reason
    unbooked    seqs in the surviving journal that the ledger does not have as trained, and the other way round
    problems    other inconsistencies, as text
    """

    step: int = 0
    epochs: int = 0
    issued: int = 0
    settled: int = 0
    trained: int = 0
    by_reason: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    rolled_back: int = 0
    twice: list[int] = field(default_factory=list)
    missing: list[int] = field(default_factory=list)
    unbooked: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    checkpoints: dict[str, str] = field(default_factory=dict)
    torn_files: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Return whether nothing is lost or duplicated, accounting is consistent, and every checkpoint is readable."""
        return not (self.twice or self.missing or self.unbooked or self.problems)

    def render(self) -> str:
        """Return a table."""
        rows = [
            ("optimiser steps", f"{self.step}, by {self.epochs} learner starts in the surviving lineage"),
            ("seqs issued", self.issued),
            ("  settled", self.settled),
            ("  trained", self.trained),
            *((f"  {reason}", count) for reason, count in sorted(self.by_reason.items())),
            ("groups of steps that a crash rolled back", self.rolled_back),
            ("seqs trained twice", _listed(self.twice)),
            ("seqs missing", _listed(self.missing)),
            ("trained and not booked, or booked and not trained", _listed(self.unbooked)),
            *((f"tokens {name}", count) for name, count in self.tokens.items()),
            *((f"checkpoint {name}", state) for name, state in self.checkpoints.items()),
            ("journal files that a crash cut short", _listed(self.torn_files)),
            ("accounting", "consistent" if self.ok else "; ".join(self.problems) or "INCONSISTENT"),
        ]
        width = max(len(name) for name, _ in rows) + 2
        return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _listed(items: Sequence[Any]) -> str:
    more = f" and {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return f"{len(items)}" + (f": {', '.join(map(str, items[:SHOWN]))}{more}" if items else "")


@dataclass(frozen=True)
class Frame:
    """One trained group."""

    epoch: int
    step: int
    seq: int
    sampled: int


def check(run_dir: Path, *, issued: int = 0, spoiled: Collection[str] = ()) -> Verdict:
    """Check a run. issued: highest seq known to be issued; spoiled: checkpoints that a fault damaged."""
    verdict = Verdict()
    folder = run_dir / "checkpoints"
    try:
        current = (folder / "CURRENT").read_text().strip()
        manifest = json.loads((folder / current / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        verdict.problems.append(f"no checkpoint in force: {error}")
        return verdict
    _checkpoints(folder, current, spoiled, verdict)
    ledger, lineage = manifest["ledger"], [tuple(pair) for pair in manifest["lineage"]]
    verdict.step, verdict.epochs = int(manifest["step"]), len(lineage)
    frames = list(journal(run_dir / "journal", verdict.torn_files))
    living = [f for f in frames if survives(f.epoch, f.step, lineage, verdict.step)]
    verdict.rolled_back = len(frames) - len(living)
    times = Counter(frame.seq for frame in living)
    verdict.trained = len(times)
    verdict.twice = sorted(seq for seq, n in times.items() if n > 1)
    _books(ledger, set(times), issued, verdict)
    _tokens(manifest, living, verdict)
    return verdict


def survives(epoch: int, step: int, lineage: Sequence[tuple[int, int]], last: int) -> bool:
    """Return whether step `step` of the learner of `epoch` is part of the weights in the checkpoint of step `last`."""
    began = dict(lineage)
    ends = [first for later, first in lineage if later > epoch]
    return epoch in began and began[epoch] < step <= min([*ends, last])


def _books(ledger: dict[str, Any], trained: set[int], issued: int, verdict: Verdict) -> None:
    watermark, above = int(ledger["watermark"]), {int(seq) for seq in ledger["above"]}
    notes = {int(seq): (str(outcome), str(reason)) for seq, outcome, reason in ledger["notes"]}
    settled = set(range(1, watermark + 1)) | above
    verdict.settled, verdict.issued = len(settled), max(issued, max(settled, default=0))
    filtered = {f"filtered ({reason})": int(n) for reason, n in ledger.get("filtered", {}).items()}
    verdict.by_reason = dict(Counter(f"{outcome} ({reason})" for outcome, reason in notes.values()) + Counter(filtered))
    # Filtered seqs are only counted. If the count fits, they are those that are settled and found nowhere else.
    nowhere = settled - trained - set(notes)
    explained = set(notes) | (nowhere if len(nowhere) == sum(filtered.values()) else set())
    verdict.missing = [seq for seq in range(1, verdict.issued + 1) if seq not in trained and seq not in explained]
    verdict.unbooked = sorted(trained ^ (settled - explained))
    counts = {str(k): int(v) for k, v in ledger["counts"].items()}
    if len(notes) != len(ledger["notes"]):
        verdict.problems.append("a seq is recorded with two reasons")
    if counts.get("filtered", 0) != sum(n for reason, n in verdict.by_reason.items() if reason.startswith("filtered ")):
        verdict.problems.append(f"{counts.get('filtered', 0)} are recorded as filtered, the reasons differ")
    if trained & set(notes):
        verdict.problems.append(f"trained, and recorded as not: {_listed(sorted(trained & set(notes)))}")
    if not set(notes) <= settled:
        verdict.problems.append("a seq has a reason and is not settled")
    if sum(counts.values()) != len(settled):
        verdict.problems.append(f"outcomes add up to {sum(counts.values())}, {len(settled)} seqs are settled")
    if counts.get("trained") != len(trained):
        verdict.problems.append(f"{counts.get('trained')} are recorded as trained, the journal has {len(trained)}")


def _tokens(manifest: dict[str, Any], living: Sequence[Frame], verdict: Verdict) -> None:
    sampled = sum(frame.sampled for frame in living)
    booked = int(manifest.get("tally", {}).get("tokens_sampled", sampled))
    verdict.tokens = {"in trained groups, by the journal": sampled, "in trained groups, by the manifest": booked}
    if sampled != booked:
        verdict.problems.append(f"tokens: the journal has {sampled}, the manifest {booked}")
    law = manifest.get("tokens")
    if law is not None:
        ended = {str(name): int(tokens) for name, tokens in law["buckets"].items()}
        verdict.tokens |= {"that arrived, by the manifest": int(law["generated"]), **ended}
        if sum(ended.values()) != int(law["generated"]):
            verdict.problems.append(f"tokens: {law['generated']} arrived, {sum(ended.values())} ended somewhere")
        if ended["trained"] + ended["masked"] != sampled:
            both = f"{ended['trained']} trained + {ended['masked']} masked"
            verdict.problems.append(f"tokens: {both} by the manifest, {sampled} by the journal")


def _checkpoints(folder: Path, current: str, spoiled: Collection[str], verdict: Verdict) -> None:
    for path in sorted(p for p in folder.glob("step_*") if p.is_dir()):
        state = _readable(path)
        note = " (in force)" if path.name == current else ""
        verdict.checkpoints[path.name + note] = state or "readable"
        if state and path.name not in spoiled:
            verdict.problems.append(f"checkpoint {path.name}: {state}")


def _readable(path: Path) -> str:
    """Return "" if every file matches the manifest, else the error."""
    try:
        files = json.loads((path / "manifest.json").read_text())["files"]
        for name, entry in files.items():
            raw = (path / name).read_bytes()
            if len(raw) != entry["bytes"] or hashlib.sha256(raw).hexdigest() != entry["sha256"]:
                return f"{name} is not what the manifest says"
    except (OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def journal(folder: Path, torn: list[str]) -> Iterator[Frame]:
    """Yield every complete frame, in order of the files. Add files that end within a frame to `torn`."""
    for path in sorted(folder.glob("groups-*.bin")):
        raw, at = path.read_bytes(), 0
        while at < len(raw):
            head = raw[at : at + FRAME.size]
            length, crc = FRAME.unpack(head) if len(head) == FRAME.size else (0, 0)
            content = raw[at + FRAME.size : at + FRAME.size + length]
            if not length or len(content) != length or zlib.crc32(content) != crc:
                torn.append(path.name)
                break
            at += FRAME.size + length
            frame = msgpack.unpackb(content, strict_map_key=False)
            header = msgpack.unpackb(frame["h"], strict_map_key=False)
            yield Frame(int(frame["epoch"]), int(frame["step"]), int(header["seq"]), sum(header["sampled"]))


def main() -> int:
    parser = argparse.ArgumentParser(description="Judge a run from its checkpoint and journal.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--issued", type=int, default=0, help="highest seq known to have been issued")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    verdict = check(args.run_dir, issued=args.issued)
    print(json.dumps(asdict(verdict) | {"ok": verdict.ok}) if args.json else verdict.render())
    return 0 if verdict.ok else 1


if __name__ == "__main__":
    sys.exit(main())
