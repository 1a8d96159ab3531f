"""Texts of others reach a terminal and a log without control characters."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from deploy.terminal import wrapped
from foray.cli import main
from protocol.errors import UserError
from protocol.redaction import for_terminal, printable
from protocol.runtime.log import RedactingFormatter

HOSTILE = "\x1b]0;owned\x07\x1b[2J\u202eevil"


def test_everything_but_line_breaks_and_tabs_is_escaped() -> None:
    assert printable(HOSTILE) == r"\x1b]0;owned\x07\x1b[2J\u202eevil"
    assert for_terminal("a\tb\nc") == "a\tb\nc" and printable("a\nb", keep="") == r"a\x0ab"
    assert printable("schön \U000e0001") == r"schön \U000e0001"


def test_errors_logs_tables_and_pages_escape_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error = UserError(f"no model {HOSTILE}", why=HOSTILE, todo=HOSTILE).render()
    record = logging.LogRecord("x", logging.INFO, "x", 1, "engine %s", (HOSTILE,), None)
    (tmp_path / "r").mkdir()
    (tmp_path / "r" / "run.json").write_text(json.dumps({"id": HOSTILE, "state": f"done{HOSTILE}"}))
    assert main(["runs", str(tmp_path)]) == 0
    texts = [error, RedactingFormatter("%(message)s").format(record), capsys.readouterr().out, *wrapped(HOSTILE, 0, 2)]
    for text in texts:
        assert "\x1b" not in text and "\x07" not in text and "\u202e" not in text and r"\x1b]0;owned" in text
