"""`make fuzz INPUTS=1000000 REQUESTS=20000 SEED=0`: fuzz all code that reads untrusted bytes.

Exit code 1 where anything was found; the inputs that did it are in the folder that is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import fuzz_coverage
from fuzz_drive import Result, run_decoders
from fuzz_http import GROWTH_MB, Campaign, all_campaigns, drawing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="malformed inputs over all decoders")
    parser.add_argument("--requests", type=int, default=20_000, help="HTTP requests over all services")
    parser.add_argument("--guided", type=int, default=20_000, help="inputs of atheris to each of its decoders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=[], help="names of decoders")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    args = parser.parse_args()
    keep = Path(tempfile.mkdtemp(prefix="foray-fuzz-found-"))
    say = (
        (lambda line: print(line, file=sys.stderr, flush=True)) if args.json else (lambda line: print(line, flush=True))
    )
    begun = time.monotonic()
    decoders = run_decoders(args.inputs, args.seed, names=args.only, keep=keep) if args.inputs else []
    for line in decoder_table(decoders):
        say(line)
    guided: list[fuzz_coverage.Coverage] = []
    if args.guided and fuzz_coverage.available():
        for name in fuzz_coverage.TARGETS:
            guided.append(fuzz_coverage.cover(name, args.guided, args.seed, keep))
            say(
                f"guided {guided[-1].name:<22} {guided[-1].inputs:>9,} inputs, {guided[-1].edges:,} edges, "
                f"peak {guided[-1].peak_mb} MB  {guided[-1].crash}"
            )
    elif args.guided:
        say("atheris is not installed: no coverage-guided inputs (pip install foray[fuzz])")
    services = all_campaigns(args.requests, args.seed, drawn=drawing()) if args.requests else []
    if args.requests and not drawing():
        say("schemathesis is not installed: all requests are raw ones (pip install foray[fuzz])")
    for line in service_table(services):
        say(line)
    found = sum(r.crashes for r in decoders) + sum(bool(g.crash) for g in guided) + sum(len(s.wrong) for s in services)
    inputs = sum(r.inputs for r in decoders) + sum(g.inputs for g in guided)
    asked = sum(s.raw + s.drawn for s in services)
    took = time.monotonic() - begun
    say(f"{inputs:,} inputs, {asked:,} requests, {found} found, {took:.0f} s, seed {args.seed}; {keep}")
    if args.json:
        whole: dict[str, Any] = {"inputs": inputs, "requests": asked, "found": found, "seed": args.seed}
        whole |= {"decoders": [asdict(r) for r in decoders], "guided": [asdict(g) for g in guided]}
        print(json.dumps(whole | {"services": [asdict(s) for s in services], "keep": str(keep)}))
    return 1 if found else 0


def decoder_table(results: list[Result]) -> list[str]:
    """One line a decoder, and the crashes under it."""
    if not results:
        return []
    lines = [
        f"{'decoder':<24} {'inputs':>9} {'accepted':>9} {'refused':>9} {'slowest':>22} {'peak MB':>8} {'crashes':>8}"
    ]
    for r in results:
        slowest = f"{r.slowest_s * 1e3:.1f} ms ({r.slowest_bytes:,} B)"
        refused = sum(r.refused.values())
        lines.append(
            f"{r.name:<24} {r.inputs:>9,} {r.accepted:>9,} {refused:>9,} {slowest:>22} {r.peak_mb:>8.0f} {r.crashes:>8}"
        )
        lines += [f"    {kept['error']}: {kept['where'][:200]}\n    {kept['input']}" for kept in r.kept]
    kinds: dict[str, int] = {}
    for r in results:
        for name, count in r.refused.items():
            kinds[name] = kinds.get(name, 0) + count
    seconds = sum(r.seconds for r in results)
    total = f"{sum(r.inputs for r in results):,} inputs to {len(results)} decoders in {seconds:.0f} s"
    by_type = ", ".join(f"{name} {count:,}" for name, count in sorted(kinds.items(), key=lambda item: -item[1]))
    return [*lines, f"{total}; refused as: {by_type}"]


def service_table(campaigns: list[Campaign]) -> list[str]:
    """Two lines a service, and what is wrong under it."""
    lines = []
    for c in campaigns:
        assert c.before is not None and c.after is not None
        statuses = ", ".join(f"{status} {count:,}" for status, count in c.statuses.items())
        lines.append(
            f"{c.kind:<10} {c.raw + c.drawn:>7,} requests ({c.drawn:,} drawn) in {c.seconds:.0f} s: {statuses}"
        )
        memory = f"memory {c.before.rss_mb:.0f} -> {c.after.rss_mb:.0f} MB (bound +{GROWTH_MB:.0f})"
        rest = [f"{name} {getattr(c.before, name)} -> {getattr(c.after, name)}" for name in ("fds", "tasks", "threads")]
        lines.append(f"{'':<10} {', '.join([memory, *rest])}")
        lines += [f"    {wrong[:600]}" for wrong in c.wrong[:20]]
        lines += [f"    and {len(c.wrong) - 20} more"] if len(c.wrong) > 20 else []
    return lines


if __name__ == "__main__":
    sys.exit(main())
