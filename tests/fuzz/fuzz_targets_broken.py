"""Decoders that misbehave on `x`, each in its own way, to test the fuzzer. Not part of the campaign."""

from __future__ import annotations

import os
import signal

from fuzz_targets import Decoder


def _slow(raw: bytes) -> None:
    for _ in range(5_000_000 if raw == b"x" else 0):
        pass


def _greedy(raw: bytes) -> int:
    return len(b"y" * (200 << 20)) if raw == b"x" else 0


def _wrong(raw: bytes) -> None:
    if raw == b"x":
        raise KeyError("undocumented")


def _dies(raw: bytes) -> None:
    if raw == b"x":
        os.kill(os.getpid(), signal.SIGSEGV)


def _well(raw: bytes) -> None:
    if raw == b"x":
        raise ValueError("documented")


def decoders() -> tuple[Decoder, ...]:
    def made(name: str, run: object, cpu_s: float = 20.0) -> Decoder:
        return Decoder(name, run, (ValueError,), (b"a",), "text", lambda raw: b"x", cpu_s=cpu_s, rss_mb=50)  # type: ignore[arg-type]

    return (
        made("slow", _slow, cpu_s=0.02),
        made("greedy", _greedy),
        made("wrong", _wrong),
        made("dies", _dies),
        made("well", _well),
    )
