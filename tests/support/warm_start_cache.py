"""The demo's warm start, made once and kept in `.cache/` under the hash of everything that makes it.

It appears atomically: it is made in a temporary folder and renamed, under a lock that workers wait for.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from dataclasses import asdict, dataclass
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache"
MAKERS, PROMPTS = ROOT / "foray" / "demo", ROOT / "rollout_server" / "prompts"
KEPT = 2
"""Warm starts that stay: this one and the one before it."""
PRACTICE, HABITS, SEED = 200, 60, 0
"""Fewer steps than the demo's, enough to pass its gate with this seed."""


@dataclass(frozen=True)
class WarmStart:
    """The model's directory, the report of the warm start as JSON, and the lines it logged."""

    directory: Path
    report: dict[str, Any]
    lines: list[str]


def key() -> str:
    """What decides the model: the code, the budget, the libraries that compute."""
    digest = sha256(
        f"{PRACTICE} {HABITS} {SEED} {version('torch')} {version('transformers')} {version('tokenizers')}".encode()
    )
    for path in sorted([*MAKERS.glob("*.py"), *PROMPTS.glob("*.py")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cached_warm_start(cache: Path = CACHE) -> WarmStart:
    """The warm start of this code; makes it if there is none."""
    cache.mkdir(exist_ok=True)
    place = cache / f"warm-{key()[:32]}"
    with (cache / "warm.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.is_dir():
            _make(place)
        place.touch()
        for old in sorted(cache.glob("warm-*/"), key=lambda one: one.stat().st_mtime)[:-KEPT]:
            shutil.rmtree(old)
    saved = json.loads((place / "warm_start.json").read_text())
    return WarmStart(place / "model", saved["report"], saved["lines"])


def _make(place: Path) -> None:
    from foray.demo.warmstart import WarmStartBudget, warm_start

    building, lines = place.with_name("building"), list[str]()
    shutil.rmtree(building, ignore_errors=True)
    report = warm_start(building / "model", SEED, lines.append, WarmStartBudget(practice=PRACTICE, habits=HABITS))
    (building / "warm_start.json").write_text(json.dumps({"report": asdict(report), "lines": lines}))
    building.rename(place)
