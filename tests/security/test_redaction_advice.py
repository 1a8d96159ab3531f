"""Advice survives redaction: commands to paste are printed unchanged."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.errors import UserError
from protocol.redaction import SHOWN, redact
from protocol.runtime.http.auth import MAKE_ONE, Access, check_bind

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "rollout_server", "learner", "retriever", "deploy", "foray")


def advice() -> Iterator[tuple[str, str]]:
    """(file:line, text) of every string in the packages that holds a shell command, the commonest values inserted."""
    for path in sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py")):
        inside: set[int] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if id(node) in inside:
                continue
            if isinstance(node, ast.JoinedStr):
                inside |= {id(part) for part in node.values}
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values)
                text = text.replace("{}=$({})", f"FORAY_NODE_TOKEN=$({MAKE_ONE})").replace("{}", "NAME")
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                text = node.value
            else:
                continue
            if "export " in text or "=$" in text or "FORAY_" in text:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", text


def test_every_text_with_a_shell_command_passes_unchanged() -> None:
    found = list(advice())
    assert len(found) > 30, "the collector finds the advice"
    assert not [(where, text) for where, text in found if redact(text) != text]


def test_the_offered_command_can_be_pasted() -> None:
    with pytest.raises(UserError) as raised:
        check_bind("0.0.0.0", Access({}), "retriever.host")
    assert f"export FORAY_NODE_TOKEN=$({MAKE_ONE});" in raised.value.render()


@pytest.mark.parametrize(
    "text",
    [
        "export FORAY_NODE_TOKEN=$(python -c 'import secrets; print(secrets.token_urlsafe(32))')",
        'curl "http://127.0.0.1/v1?token=${FORAY_VIEWER_TOKEN}"',
        "API_KEY=$OTHER_KEY foray up run.yaml",
        "export SEARCH_API_KEY=...",
    ],
)
def test_placeholders_for_secrets_are_kept(text: str) -> None:
    assert redact(text) == text


@pytest.mark.parametrize("secret", ["$(hunter2", "${hunter2", "$HUNTERx2", "..hunter2", "$HUNTER-2", "hunter2"])
def test_what_only_begins_like_that_is_cut_out(secret: str) -> None:
    assert redact(f"/x?password={secret}&a=b") == f"/x?password={SHOWN}&a=b"
