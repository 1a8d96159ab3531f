"""`python driver.py --minutes 10 --seed 1 --persistence aof|none [--control] [--json]`: faults, recovery, judgement.

    a ring of real processes -> faults for some minutes -> everything healed -> every issued seq must be settled
    -> the learner is stopped, started again with a last step, and must exit with status 0 -> checker

Exit status 0: nothing lost, nothing twice, accounting consistent, every fault kind witnessed, every recovery path
taken, no process ended without a fault. With --control the ring has no delivery rules, and 0 means that the checker
failed it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))
from attacks import KINDS
from battle import LATE_S, Battle, Say
from checker import Verdict, check
from control import EVERYTHING
from faults_host import NoSpace
from faults_standstill import BlockedLoop, Standstill, Suspended
from recoveries import MADE_ROOM, Observer, from_logs
from ring import MAXMEMORY_MB, ROOM, Ring, open_ring
from schedule import Planned, make_schedule, render
from wholeness import Ejections, Recovery, ejections

LAST_STEPS = 8
"""Steps of the learner that ends the run."""
HOLES_S, END_S = 150.0, 120.0
"""Timeouts of recovery and of the end of the run, for a busy machine."""
BEGIN_S = 150.0
WHOLE_S = 45.0
"""Time for every process to make progress after the last fault; an engine stays ejected for 30 s."""
LOOSE = re.compile(r".*(?:was never retrieved|was never awaited|Unclosed ).*")
"""Warnings of asyncio about forgotten tasks and exceptions."""
ACCEPT = "socket.accept() out of system resource"
"""A server without a free file descriptor."""


@dataclass
class Result:
    """The findings of a run of the driver."""

    seed: int
    seconds: float
    persistence: bool
    control: bool
    verdict: Verdict
    done: Counter[str] = field(default_factory=Counter)
    witnessed: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    recoveries: Counter[str] = field(default_factory=Counter)
    recovered_s: float = 0.0
    maxmemory_mb: int = MAXMEMORY_MB
    refused: int = 0
    """Commands that Redis refused for lack of memory."""
    failures: list[str] = field(default_factory=list)
    """Of the run or of the harness, beside the checker's."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Planned faults that were left out, because their targets were down or in another fault."""
    whole_s: dict[str, dict[str, float]] = field(default_factory=dict)
    """Kind of fault -> its number, median and longest time until the ring was whole again, in seconds."""
    standstills: list[Recovery] = field(default_factory=list)
    ejected: Ejections = field(default_factory=Ejections)

    @property
    def ok(self) -> bool:
        """Return whether the run passed, the exit status."""
        seen = bool(self.verdict.twice) and bool(self.verdict.missing)
        return seen if self.control else self.verdict.ok and not self.failures

    def render(self) -> str:
        """For people."""
        lines = [
            f"{'':<22}{'':>6}{'':>11}{'':>10}   seconds until whole again",
            f"{'fault':<22}{'done':>6}{'witnessed':>11}{'left out':>10}{'median':>10}{'longest':>9}{'of':>5}",
        ]
        for kind, n in sorted(self.done.items()):
            times = self.whole_s.get(kind, {})
            shown = f"{times.get('median', '-'):>10}{times.get('longest', '-'):>9}{times.get('undisturbed', 0):>5}"
            lines.append(f"{kind:<22}{n:>6}{self.witnessed[kind]:>11}{self.skipped[kind]:>10}{shown}")
        totals = (sum(self.done.values()), sum(self.witnessed.values()), self.left_out)
        lines += [f"{'all':<22}{totals[0]:>6}{totals[1]:>11}{totals[2]:>10}", ""]
        lines += [f"{'standstill':<30}{'lasted s':>10}{'whole again after s':>22}"] if self.standstills else []
        lines += [
            f"{f'{r.kind} {r.target}':<40}{r.lasted:>10.1f}{'-' if r.seconds is None else f'{r.seconds:.1f}':>12}"
            + (" in another fault" if r.disturbed else "")
            for r in sorted(self.standstills, key=lambda r: (r.kind, r.target, r.lasted))
        ]
        lines += ["", *(f"{what:<40}{n:>8}" for what, n in self.losses().items()), ""]
        lines += [f"{'path of recovery':<40}{'taken':>8}"]
        lines += [f"{path:<40}{n:>8}" for path, n in sorted(self.recoveries.items()) if n]
        lines += ["", self.verdict.render(), ""]
        lines += [f"FAILURE: {failure}" for failure in self.failures]
        mode = "AOF" if self.persistence else "no persistence"
        mode += f" and {self.maxmemory_mb} MiB, {self.refused} commands refused for want of memory"
        what = "control: no delivery rules" if self.control else "Foray"
        end = (
            ("the checker sees it" if self.ok else "THE CHECKER DOES NOT SEE IT")
            if self.control
            else ("PASSED" if self.ok else "FAILED")
        )
        lines.append(
            f"{what}, seed {self.seed}, {self.seconds:.0f} s of faults, Redis with {mode}: "
            f"{sum(self.done.values())} faults, {len(self.verdict.twice)} seqs trained twice, "
            f"{len(self.verdict.missing)} missing; whole again {self.recovered_s:.0f} s after the last: {end}"
        )
        return "\n".join(lines)

    def losses(self) -> dict[str, int]:
        """What faults must not cost, and what they may."""
        return {
            "engines ejected though healthy": len(self.ejected.healthy),
            "engines ejected that a fault had hit": self.ejected.faulty,
            "groups lost": len(self.verdict.missing),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        # not asdict: of a Counter it makes a Counter of pairs
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        plain |= {"ejected": vars(self.ejected), "standstills": [asdict(r) for r in self.standstills]}
        return plain | self.losses() | {"ok": self.ok, "verdict": asdict(self.verdict) | {"ok": self.verdict.ok}}


def fight(
    directory: Path,
    model: Path,
    planned: Sequence[Planned],
    *,
    seed: int,
    seconds: float,
    persistence: bool,
    control: bool = False,
    maxmemory_mb: int = MAXMEMORY_MB,
    late_s: float = LATE_S,
    say: Say = print,
) -> Result:
    """Run a ring with a schedule of faults, wait for recovery and the end of the run, and run the checker.

    late_s  seconds that a fault may wait for its target before it is skipped
    """
    result = _fight(directory, model, planned, seed, seconds, persistence, control, maxmemory_mb, late_s, say)
    if left := engines_of(directory):
        result.failures.append(f"processes are left: {left}")
    return result


def _fight(
    directory: Path,
    model: Path,
    planned: Sequence[Planned],
    seed: int,
    seconds: float,
    persistence: bool,
    control: bool,
    maxmemory_mb: int,
    late_s: float,
    say: Say,
) -> Result:
    wrong = EVERYTHING if control else ()
    holes_s = 8.0 if control else HOLES_S
    small = any(item.kind == NoSpace.name for item in planned)
    with open_ring(
        directory, model, persistence=persistence, wrong=wrong, maxmemory_mb=maxmemory_mb, small_disk=small
    ) as ring:
        ring.began = time.time()
        ring.start_all()
        first = 25 if control else 1
        if not ring.until(lambda: ring.manifest().get("step", 0) >= first, BEGIN_S):
            raise RuntimeError(f"the ring does not begin:\n{ring.wards['learner'].life.text[-3000:]}")
        say(f"a checkpoint of step {first} or later after {ring.now:.1f} s; faults begin")
        ring.began = time.time()
        failures: list[str] = []
        with Observer(ring) as observer:
            battle = Battle(ring, say, late_s=late_s)
            observer.wholeness.injected = battle.injected
            battle.run(planned, seconds)
            healed = ring.now
            say(f"{healed:7.2f} s  the last fault is over: {sum(battle.done.values())} of them")
            battle.settle(10)
            failures += recover(ring, observer, holes_s, say)
            ring.until(lambda: control or not observer.wholeness.pending, WHOLE_S)
            recovered_s = ring.now - healed
            failures += end_run(ring, say, restart=not control)
        paths = from_logs(ring) + observer.counts
        battle.write()
        failures += [f"{kind}: injected and never witnessed" for kind in battle.blind()]
        failures += [f"{kind}: no path of recovery was taken" for kind in battle.unmended(paths)]
        failures += [f"{f.at:.1f} s: {f.what} ({f.log and f.log.name})" for f in ring.findings]
        failures += tracebacks(ring)
        if maxmemory_mb < MAXMEMORY_MB and not paths[MADE_ROOM]:
            failures.append("the memory limit was never reached, or no learner made room")
        ejected = ejections([(life.log.name, life.text) for life in ring.lives("rollout")], battle.injected)
        failures += [] if control else [f"a healthy engine: {what}" for what in ejected.healthy]
        whole = observer.wholeness
        standing = [r for r in whole.recoveries if r.kind in (Standstill.name, Suspended.name, BlockedLoop.name)]
        verdict = check(ring.run_dir, issued=observer.issued, spoiled=ring.spoiled)
        return Result(
            *(seed, seconds, persistence, control, verdict),
            *(battle.done, battle.witnessed, len(battle.left_out), paths, recovered_s),
            *(maxmemory_mb, observer.refused, failures),
            skipped=Counter(item.kind for item in battle.left_out),
            whole_s=whole.by_kind(),
            standstills=standing,
            ejected=ejected,
        )


def recover(ring: Ring, observer: Observer, holes_s: float, say: Say) -> list[str]:
    """With everything running, each issued seq must be settled without help. Return the problems."""
    issued = observer.issued
    if not ring.until(lambda: all(ward.alive for ward in ring.wards.values()), 30):
        return [f"not running: {[name for name, ward in ring.wards.items() if not ward.alive]}"]
    nodes = [name for name in ring.wards if name.startswith("engine")]
    if not ring.until(lambda: len(engines_of(ring.directory)) == len(nodes), 30):
        return [f"{len(nodes)} nodes run, and {len(engines_of(ring.directory))} engines"]
    if ring.until(lambda: ring.manifest()["ledger"]["watermark"] >= issued, holes_s):
        say(f"{ring.now:7.2f} s  every one of the {issued} seqs issued under fire is settled")
        return []
    return [f"holes stay open: watermark {ring.manifest()['ledger']['watermark']}, issued {issued}"]


def end_run(ring: Ring, say: Say, *, restart: bool) -> list[str]:
    """Stop the learner and start it with a last step: its accounting must be consistent, and it must exit with 0.

    restart: off for the control, whose learner would wait forever for lost seqs
    """
    ward = ring.wards["learner"]
    ward.wanted, ward.life.doomed = False, "the end"
    ward.life.send(signal.SIGTERM)
    if not ring.until(lambda: not ward.alive, END_S):
        return ["the learner does not stop on SIGTERM"]
    if ward.life.status != 128 + signal.SIGTERM:
        return [f"the learner exited with {ward.life.status} on SIGTERM: {ward.life.text[-400:]}"]
    if not restart:
        return []
    ring.learner_overrides = (f"run.steps={int(ring.manifest()['step']) + LAST_STEPS}",)
    last = ward.start()
    last.doomed = "the end"
    if not ring.until(lambda: last.status is not None, END_S):
        return [f"the last learner does not end: {last.text[-400:]}"]
    say(f"{ring.now:7.2f} s  the last learner ended with {last.status}: {_last_word(last.text)}")
    return [] if last.status == 0 else [f"the last learner ended with {last.status}: {last.text[-800:]}"]


def _last_word(text: str) -> str:
    found = re.findall(r"learner\.serve: (done: .*)", text)
    return found[-1] if found else text[-200:]


def tracebacks(ring: Ring) -> list[str]:
    """Return unexpected errors, each once, with their location."""
    found: Counter[str] = Counter()
    for path in sorted(ring.logs.glob("*.log")):
        if path.name.startswith("redis"):
            continue
        parts = path.read_text(errors="replace").split("Traceback (most recent call last):")
        for before, part in pairwise(parts):
            if ACCEPT in before[-300:]:
                continue  # asyncio reports it and tries again
            lines = [line for line in part.splitlines() if line and not line.startswith((" ", "\t"))]
            found[f"{path.name.partition('.')[0]}: {lines[0][:200] if lines else 'a traceback without an end'}"] += 1
        for match in LOOSE.finditer(path.read_text(errors="replace")):
            found[f"{path.name.partition('.')[0]}: {match[0][:200]}"] += 1
    return [f"traceback, {n} times: {what}" for what, n in found.items()]


def engines_of(directory: Path) -> list[int]:
    """Return living processes whose command line names this run's folder: engines, with any parent."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes()
                if b"rollout_server.cpu_engine" in words and b"guard.py" not in words and bytes(directory) in words:
                    found.append(int(entry.name))
    return found


def a_model(directory: Path, given: Path | None, say: Say) -> Path:
    """Return a warm-started tiny model: the given one, that of FORAY_TEST_MODEL, or a new one."""
    named = given or (Path(os.environ["FORAY_TEST_MODEL"]) if os.environ.get("FORAY_TEST_MODEL") else None)
    if named is not None:
        return named.absolute()
    made = directory / "model"
    if not (made / "model.safetensors").exists():
        from foray.demo.warmstart import WarmStartBudget, warm_start

        say(f"a warm start, once, into {made}")
        part = directory / "model.part"
        shutil.rmtree(part, ignore_errors=True)
        warm_start(part, 0, lambda _: None, WarmStartBudget(practice=200, habits=60))
        part.rename(made)
    return made.absolute()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=10.0, help="of faults (default: 10)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--persistence", choices=["aof", "none"], default="aof", help="none: each kill wipes Redis")
    parser.add_argument(
        "--maxmemory-mb",
        type=int,
        default=MAXMEMORY_MB,
        help=f"of Redis (default: {MAXMEMORY_MB}); with less a neighbour leaves the run {ROOM >> 10} KiB of it",
    )
    parser.add_argument("--control", action="store_true", help="a ring without the delivery rules")
    parser.add_argument("--model", type=Path, help="a warm-started model (default: FORAY_TEST_MODEL, or one is made)")
    parser.add_argument("--dir", type=Path, default=Path("runs/chaos"), help="where model and runs go")
    parser.add_argument(
        "--kinds", nargs="+", choices=sorted(KINDS), default=list(KINDS), help="of faults (default: all)"
    )
    parser.add_argument("--schedule", action="store_true", help="print the schedule and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end (the rest on stderr)")
    args = parser.parse_args()
    out = sys.stderr if args.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    seconds = args.minutes * 60
    for name, why in {name: KINDS[name].lacking() for name in args.kinds}.items():
        if why:
            say(f"{name}: left out: {why}")
    kinds = [name for name in args.kinds if not KINDS[name].lacking()]
    planned = make_schedule(args.seed, seconds, kinds=kinds)
    say(f"seed {args.seed}, {len(planned)} faults planned in {seconds:.0f} s:\n{render(planned)}")
    if args.schedule:
        return 0
    args.dir.mkdir(parents=True, exist_ok=True)
    model = a_model(args.dir, args.model, say)
    directory = Path(tempfile.mkdtemp(prefix=f"seed{args.seed}-{args.persistence}-", dir=args.dir)).absolute()
    say(f"\nlogs, journal and checkpoints are in {directory}\n")
    result = fight(
        directory,
        model,
        planned,
        seed=args.seed,
        seconds=seconds,
        persistence=args.persistence == "aof",
        control=args.control,
        maxmemory_mb=args.maxmemory_mb,
        say=say,
    )
    (directory / "result.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
    print("\n" + result.render(), file=out, flush=True)
    if args.json:
        print(json.dumps(result.to_json()))
    return 0 if result.ok else 1


if __name__ == "__main__":
    sys.exit(main())
