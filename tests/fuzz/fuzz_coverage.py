"""Coverage-guided inputs for the wire decoders with atheris, in a separate process because it instruments modules.

Messages, headers and stream entries, with the golden files as the first inputs. libFuzzer ends the process at the first
error that is not documented, and leaves the input in `keep`.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

TARGETS = (
    "codec.decode",
    "header.read_header",
    "header.check_body",
    "entry.read_entry",
    "engine.reply",
    "search.search_r1",
)
PART = {"codec": "protocol", "header": "protocol", "entry": "learner", "engine": "rollout", "search": "rollout"}
MAX_BYTES = 1 << 16
RSS_MB = 1024


@dataclass(frozen=True)
class Coverage:
    """The report of libFuzzer. edges: number reached in the instrumented modules."""

    name: str
    inputs: int
    edges: int
    peak_mb: int
    crash: str


def available() -> bool:
    """Whether atheris is installed (extra `fuzz`)."""
    return importlib.util.find_spec("atheris") is not None


def cover(name: str, inputs: int, seed: int, keep: Path) -> Coverage:
    """Feed one decoder with this many inputs from libFuzzer."""
    with tempfile.TemporaryDirectory(prefix="foray-fuzz-") as corpus:
        argv = [sys.executable, __file__, name, corpus, f"-runs={inputs}", f"-seed={seed + 1}", f"-max_len={MAX_BYTES}"]
        argv += [f"-rss_limit_mb={RSS_MB}", "-print_final_stats=1", f"-artifact_prefix={keep}/{name}-", "-timeout=20"]
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", check=False)
    said = done.stderr
    crash = "" if done.returncode == 0 else " ".join(said.strip().splitlines()[-12:])[:600] or f"exit {done.returncode}"
    edges = re.findall(r"cov: (\d+)", said)
    return Coverage(
        name, _stat(said, "number_of_executed_units"), int(edges[-1]) if edges else 0, _stat(said, "peak_rss_mb"), crash
    )


def _stat(said: str, name: str) -> int:
    found = re.search(rf"stat::{name}:\s+(\d+)", said)
    return int(found[1]) if found else 0


def main() -> None:
    import atheris

    sys.path.insert(0, str(Path(__file__).parent))
    name, corpus, *flags = sys.argv[1:]
    with atheris.instrument_imports(
        include=["protocol", "learner.delivery.entry", "rollout_server.engine", "rollout_server.search"]
    ):
        from fuzz_targets import load

        decoder = next(d for d in load(PART[name.partition(".")[0]]) if d.name == name)
    for number, raw in enumerate(decoder.seeds):
        Path(corpus, str(number)).write_bytes(raw)

    def one(raw: bytes) -> None:
        try:
            decoder.run(raw)
        except decoder.raises:
            pass

    atheris.Setup([sys.argv[0], corpus, *flags], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
