"""Feed decoders in a child process and measure it: crashes, hangs, CPU time and memory of every input.

    parent: run_decoders -- one child for each part --> child: inputs in turn, each noted in a slot before it is fed
                         <-- one JSON line a decoder --

A child that dies (a segmentation fault, the limit on its memory) leaves the input in its slot: the parent records a
crash and starts another child with the remaining decoders. Any exception except a decoder's documented errors is a
crash; so is an input that takes more time or memory than its decoder may.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import mmap
import os
import random
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fuzz_mutate import Mutator
from fuzz_targets import PARTS, Decoder, load

SLOT_BYTES = 1 << 16
HANG_S = 30
"""Timeout per input in wall-clock seconds: many times the CPU time that any may take."""
MEMORY_BYTES = 4 << 30
"""Address space beyond that of a child after its imports: an input that needs more is a crash."""
MOST_CRASHES = 5
"""Of one decoder that are kept; the rest is counted."""


@dataclass
class Result:
    """Results of one decoder. cpu_s: of the slowest input; rss_mb: growth of the child's peak."""

    name: str
    inputs: int = 0
    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest_bytes: int = 0
    largest: int = 0
    growth_mb: float = 0.0
    peak_mb: float = 0.0
    crashes: int = 0
    kept: list[dict[str, str]] = field(default_factory=list)


class Hung(BaseException):
    """An input took HANG_S seconds."""


def run_decoders(
    inputs: int, seed: int, *, names: Sequence[str] = (), parts: Sequence[str] = PARTS, keep: Path | None = None
) -> list[Result]:
    """Feeds `inputs` inputs, shared out by weight over the decoders of `parts` (or those with `names`).

    keep  folder for inputs that crash; a temporary one that stays otherwise
    """
    keep = keep or Path(tempfile.mkdtemp(prefix="foray-fuzz-"))
    keep.mkdir(parents=True, exist_ok=True)
    shares = _shares(parts, names)
    whole = sum(share for given in shares.values() for share in given.values())
    if not whole:
        raise SystemExit(f"no decoder of these names: {', '.join(names)}")
    results: list[Result] = []
    for part, given in shares.items():
        wanted = {name: math.ceil(inputs * share / whole) for name, share in given.items()}
        while wanted:
            done = _child(part, wanted, seed, keep)
            results += done
            for result in done:
                del wanted[result.name]
    return results


def _shares(parts: Sequence[str], names: Sequence[str]) -> dict[str, dict[str, float]]:
    """Part -> decoder -> its weight. Asked of a child: a process begins with its parent's peak of memory, and what is
    imported here would hide what an input takes there."""
    done = subprocess.run([sys.executable, __file__, ",".join(parts)], stdout=subprocess.PIPE, check=True)
    found: dict[str, dict[str, float]] = json.loads(done.stdout)
    return {part: {n: s for n, s in given.items() if not names or n in names} for part, given in found.items()}


def _child(part: str, wanted: dict[str, int], seed: int, keep: Path) -> list[Result]:
    slot = keep / f"slot-{part}"
    slot.write_bytes(b"\0" * SLOT_BYTES)
    argv = [sys.executable, __file__, part, json.dumps(wanted), str(seed), str(keep), str(slot)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error::ResourceWarning", "TMPDIR": str(keep)}
    with (keep / f"log-{part}").open("ab") as log:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=log, env=env, check=False)
    results = [Result(**json.loads(line)) for line in done.stdout.splitlines() if line.startswith(b"{")]
    left = [name for name in wanted if name not in {r.name for r in results}]
    if left:
        raw = slot.read_bytes()
        size, raw = int.from_bytes(raw[:4], "little"), raw[4:]
        if not size and not results:
            raise SystemExit(f"the child for {part} ended with {done.returncode}: see {keep / f'log-{part}'}")
        path = _save(keep, left[0], raw[:size])
        why = f"the process ended with {done.returncode}"
        results.append(Result(left[0], crashes=1, kept=[{"error": why, "input": str(path), "where": ""}]))
    slot.unlink()
    return results


def _save(keep: Path, name: str, raw: bytes) -> Path:
    path = keep / f"{name}-{zlib.crc32(raw):08x}.bin"
    path.write_bytes(raw)
    return path


def feed(decoder: Decoder, count: int, seed: int, keep: Path, slot: mmap.mmap) -> Result:
    """The inputs of one decoder, in this process."""
    rng = random.Random(f"{seed}/{decoder.name}")
    mutator = Mutator(rng, decoder.shape, decoder.seeds)
    result, refused = Result(decoder.name), Counter[str]()
    begun = time.monotonic()
    for raw in decoder.seeds:
        decoder.run(raw)  # a valid example is accepted, or the decoder is fed nonsense only
    gc.collect()
    before = peak_mb()
    for _ in range(count):
        raw = mutator.draw()
        if decoder.seal is not None and rng.random() < 0.5:
            raw = decoder.seal(raw)
        slot[:4] = min(len(raw), SLOT_BYTES - 4).to_bytes(4, "little")
        slot[4 : 4 + min(len(raw), SLOT_BYTES - 4)] = raw[: SLOT_BYTES - 4]
        problem, took = _one(decoder, raw, refused)
        result.inputs += 1
        result.largest = max(result.largest, len(raw))
        if took > result.slowest_s:
            result.slowest_s, result.slowest_bytes = took, len(raw)
        peak = peak_mb()
        if not problem and took > decoder.cpu_s + len(raw) * decoder.cpu_s_per_byte:
            problem = f"{took:.2f} s of processor time for {len(raw)} bytes"
        if not problem and peak - before > decoder.rss_mb + 50 * len(raw) / 2**20:
            problem = f"{peak - before:.0f} MB more memory for {len(raw)} bytes"
        result.growth_mb += max(0.0, peak - before)
        before = max(before, peak)
        if problem:
            result.crashes += 1
            if len(result.kept) < MOST_CRASHES and problem.splitlines()[0] not in {k["error"] for k in result.kept}:
                first, _, where = problem.partition("\n")
                result.kept.append({"error": first, "where": where, "input": str(_save(keep, decoder.name, raw))})
    result.seconds, result.peak_mb = time.monotonic() - begun, peak_mb()
    result.refused = dict(refused.most_common())
    result.accepted = result.inputs - sum(refused.values()) - result.crashes
    return result


def _one(decoder: Decoder, raw: bytes, refused: Counter[str]) -> tuple[str, float]:
    """Return the error of the decoder for `raw` ("" for none), and its CPU time in seconds."""
    problem = ""
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    start = time.thread_time()
    try:
        decoder.run(raw)
    except decoder.raises as error:
        refused[type(error).__name__] += 1
    except Hung:
        problem = f"no end within {HANG_S} s"
    except Exception as error:
        trace = traceback.extract_tb(error.__traceback__)[-3:]
        where = " <- ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(trace))
        problem = f"{type(error).__name__} at {where}\n{str(error)[:300]}"
    took = time.thread_time() - start
    signal.setitimer(signal.ITIMER_REAL, 0)
    return problem, took


def peak_mb() -> float:
    """Largest resident memory of this program so far. Not getrusage's, which begins with the peak of the parent."""
    with open("/proc/self/status", "rb") as status:
        found = re.search(rb"VmHWM:\s+(\d+)", status.read())
    return int(found[1]) / 1024 if found else 0.0


def _hang(_: int, __: FrameType | None) -> None:
    raise Hung


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("part")
    for name in ("wanted", "seed", "keep", "slot"):
        parser.add_argument(name, nargs="?")
    args = parser.parse_args()
    if args.wanted is None:
        print(json.dumps({part: {d.name: d.share for d in load(part)} for part in args.part.split(",")}))
        return
    wanted: dict[str, int] = json.loads(args.wanted)
    decoders = [d for d in load(args.part) if d.name in wanted]
    size = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGALRM, _hang)
    with Path(args.slot).open("r+b") as file, mmap.mmap(file.fileno(), SLOT_BYTES) as slot:
        for decoder in decoders:
            result: dict[str, Any] = vars(feed(decoder, wanted[decoder.name], int(args.seed), Path(args.keep), slot))
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
