"""No output of a process contains a secret: logs, tracebacks, error messages."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import redaction
from protocol.errors import UserError
from protocol.redaction import SHOWN, is_secret_name, redact, remember, remember_environment
from protocol.runtime.log import RedactingFormatter

CANARY = "c4nary/Yellow+bird=42"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    before = set(redaction._known)
    redaction._known.clear()
    yield
    redaction._known.clear()
    redaction._known.update(before)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis://user:hunter2@host:6379/0 is away", f"redis://user:{SHOWN}@host:6379/0 is away"),
        ("rediss+sentinel://:pw@a,b/name", f"rediss+sentinel://:{SHOWN}@a,b/name"),
        ("redis://h/0?sentinel_password=hunter2&x=1", f"redis://h/0?sentinel_password={SHOWN}&x=1"),
        ("Authorization: Bearer abcdefgh.ijkl", f"Authorization: Bearer {SHOWN}"),
        ("GET https://e/search?q=emma&api_key=hunter2", f"GET https://e/search?q=emma&api_key={SHOWN}"),
        ("http://127.0.0.1:8000/a@b is no login", "http://127.0.0.1:8000/a@b is no login"),
        ("12:30 mail me@home about keys and tokens", "12:30 mail me@home about keys and tokens"),
    ],
)
def test_forms_that_are_secret_whatever_they_hold(text: str, shown: str) -> None:
    assert redact(text) == shown


def test_what_is_remembered_is_cut_out_also_where_it_is_escaped() -> None:
    remember(CANARY)
    for text in (CANARY, f"q={CANARY}&", "c4nary%2FYellow%2Bbird%3D42", "c4nary/Yellow%2Bbird%3D42"):
        assert "ellow" not in redact(f"before {text} after") and redact(f"before {text} after").startswith("before ")
    remember("short")
    assert redact("a short word") == "a short word", "a word of everyday texts is no secret"


@given(st.text(alphabet=st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=8, max_size=40), st.text())
def test_any_secret_is_cut_out_of_any_text(secret: str, text: str) -> None:
    remember(secret)
    try:
        assert secret not in redact(f"{text}{secret}{text}") or secret in SHOWN
    finally:
        redaction._known.clear()


@pytest.mark.parametrize(
    "name", ["FORAY_NODE_TOKEN", "SERPER_API_KEY", "FORAY_RUN_KEY", "REDISCLI_AUTH", "DB_PASSWORD", "key"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "FORAY_NODE_TOKEN_FILE", "MONKEY", "OMP_NUM_THREADS"]
)
def test_names_of_no_secrets(name: str) -> None:
    assert not is_secret_name(name)


def test_the_environment_is_remembered_by_names_and_by_logins_in_urls() -> None:
    remember_environment({"X_TOKEN": CANARY, "PROXY": "http://me:w0rd%2Fofmine@proxy:3128", "HOME": "/home/somebody"})
    shown = redact(f"{CANARY} w0rd%2Fofmine w0rd/ofmine /home/somebody")
    assert shown == f"{SHOWN} {SHOWN} {SHOWN} /home/somebody"


def test_messages_for_people_hold_no_secret() -> None:
    remember(CANARY)
    shown = UserError(f"cannot reach redis://:{'pw'}@h/0", why=f"it said {CANARY}", todo=f"export X={CANARY}").render()
    assert CANARY not in shown and ":pw@" not in shown and shown.count(SHOWN) == 3


def test_logs_hold_no_secret_in_arguments_or_tracebacks() -> None:
    remember(CANARY)
    try:
        raise ValueError(CANARY)
    except ValueError:
        record = logging.LogRecord(
            "n", logging.ERROR, "f", 1, "said %s and %r", (CANARY, {"k": CANARY}), sys.exc_info()
        )
    line = RedactingFormatter("%(levelname)s %(message)s").format(record)
    assert CANARY not in line and line.count(SHOWN) == 3 and "ValueError" in line


def test_an_uncaught_exception_is_printed_without_secrets() -> None:
    program = """
import os
from protocol.runtime.log import start_logging
start_logging(os.environ, "%(message)s")
raise RuntimeError("lost " + os.environ["SOME_TOKEN"])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], env={"SOME_TOKEN": CANARY}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and CANARY not in done.stdout + done.stderr
    assert f"RuntimeError: lost {SHOWN}" in done.stderr
