"""Every decoder of bytes or text from other processes, with the errors that it may raise."""

from __future__ import annotations

import atexit
import importlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fuzz_mutate import Shape

PARTS = ("protocol", "learner", "rollout", "retriever", "native")
"""One child process each; `native` holds those whose parser is a library's machine code."""


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    run             decodes; returns or raises
    raises          its documented errors
    seeds           valid examples
    seal            corrects checksums, to reach the code behind them: applied to half of the inputs
    share           weight in sharing out the inputs
    cpu_s           processor time that one input may take, plus so much a byte
    rss_mb          memory that one input may add to the peak, plus 50 times its size
    """

    name: str
    run: Callable[[bytes], object]
    raises: tuple[type[Exception], ...]
    seeds: Sequence[bytes]
    shape: Shape = "bytes"
    seal: Callable[[bytes], bytes] | None = None
    share: float = 1.0
    cpu_s: float = 1.0
    cpu_s_per_byte: float = 1e-6
    rss_mb: float = 64.0


@cache
def load(part: str) -> tuple[Decoder, ...]:
    """The decoders of one part, in order."""
    decoders: tuple[Decoder, ...] = importlib.import_module(f"fuzz_targets_{part}").decoders()
    return decoders


def scratch() -> Path:
    """A folder for the life of the process."""
    folder = tempfile.TemporaryDirectory(prefix="foray-fuzz-", ignore_cleanup_errors=True)
    atexit.register(folder.cleanup)
    return Path(folder.name)
