"""Render the output of `foray dlq list` and `foray dlq show`. Pure. Untrusted text passes `escape_untrusted`."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from deploy.terminal import aligned, escape_untrusted, hexdump
from foray.watch.dead_letters import DeadLetter, Fates
from foray.watch.status import listed_reasons
from protocol.codec import decode
from protocol.errors import ProtocolError
from protocol.header import check_body, read_header

COLUMNS = ("seq", "state", "reason", "found by", "when (UTC)", "entry", "detail")


def listing(letters: Sequence[DeadLetter], fates: Fates, *, reason: str = "") -> list[str]:
    """Return a table with one line per dead letter, and one per dead seq without a dead letter."""
    silent = _silent(letters, fates, reason)
    if not letters and not silent:
        return ["no dead letters and no failed seqs"]
    rows = [
        (
            str(letter.seq or "-"),
            fates.of(letter.seq),
            escape_untrusted(letter.reason, 32),
            escape_untrusted(letter.source, 32),
            _when(letter.at),
            escape_untrusted(letter.id, 40),
            escape_untrusted(letter.detail, 60),
        )
        for letter in letters
    ]
    rows += [
        (str(seq), fates.of(seq), escape_untrusted(why, 32), "ledger", "-", "-", "failed; no dead letter")
        for seq, why in silent.items()
    ]
    found, dead = (Counter(reasons) for reasons in ((letter.reason for letter in letters), fates.dead.values()))
    return [
        *aligned(COLUMNS, rows),
        f"{len(letters)} dead letters: {listed_reasons(found) or 'none'}",
        f"{dead.total()} seqs recorded as dead: {listed_reasons(dead) or 'none'}",
    ]


def page(letter: DeadLetter, fates: Fates, *, most: int) -> list[str]:
    """Return one dead letter in full."""
    lines = [
        f"entry {escape_untrusted(letter.id)} of seq {letter.seq or 'unknown'} ({fates.of(letter.seq)}), "
        f"{_when(letter.at)}",
        f"  reason    {escape_untrusted(letter.reason)}: {escape_untrusted(letter.detail, 1000)}",
        f"  found by  {escape_untrusted(letter.source)}; kept in {' and '.join(letter.kept)}",
    ]
    facts, wrong = read_facts(letter)
    lines += [
        f"  header    {escape_untrusted(name)} = {escape_untrusted(str(value), 400)}" for name, value in facts.items()
    ]
    lines += [f"  {part:<9} {escape_untrusted(why, 400)}" for part, why in wrong.items()]
    for name, raw in (("header", letter.header), ("body", letter.body)):
        if raw:
            lines += [f"  {name}, {len(raw)} bytes kept", *(f"    {line}" for line in hexdump(raw, most))]
    return lines


def read_facts(letter: DeadLetter) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (fields of the header if readable, results of decoding header and body)."""
    facts: dict[str, Any] = {}
    said: dict[str, str] = {}
    if letter.header:
        try:
            header = read_header(letter.header)
            facts = header.model_dump()
            check_body(header, letter.body)
        except ProtocolError as error:
            said["checked"] = f"{error.reason}: {error}"
    if letter.body:
        try:
            said["body"] = f"decodes as a {type(decode(letter.body)).__name__}"
        except ProtocolError as error:
            said["body"] = f"{error.reason}: {error}"
    return facts, said


def as_json(
    run: str, letters: Sequence[DeadLetter], fates: Fates, *, reason: str = "", bodies: bool = False
) -> dict[str, Any]:
    """Return the dead letters as JSON values: bytes in base64, text unchanged (JSON escapes it)."""
    shown = []
    for letter in letters:
        row: dict[str, Any] = {
            **{"id": letter.id, "seq": letter.seq, "reason": letter.reason, "detail": letter.detail},
            **{"from": letter.source, "at": letter.at, "kept": list(letter.kept), "fate": fates.of(letter.seq)},
        }
        if bodies:
            facts, said = read_facts(letter)
            row |= {"header": facts, "said": said}
            row |= {"h": base64.b64encode(letter.header).decode(), "b": base64.b64encode(letter.body).decode()}
        shown.append(row)
    dead = [{"seq": s, "reason": why, "fate": fates.of(s)} for s, why in fates.dead.items() if reason in ("", why)]
    return {"run": run, "letters": shown, "dead": dead, "requeued": sorted(fates.requeued)}


def _silent(letters: Sequence[DeadLetter], fates: Fates, reason: str) -> dict[int, str]:
    """Return dead seqs without a dead letter: a rollout server reported that they failed, with a reason."""
    there = {letter.seq for letter in letters}
    return {seq: why for seq, why in fates.dead.items() if seq not in there and reason in ("", why)}


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if at else "-"
