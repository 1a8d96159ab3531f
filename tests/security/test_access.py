"""Access control of every service: roles, tokens, where a service may listen."""

from __future__ import annotations

import hmac
import secrets
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UserError
from protocol.runtime.http import auth as module
from protocol.runtime.http.auth import (
    MAY,
    OPEN,
    ROLES,
    Access,
    RequestHead,
    Role,
    check_bind,
    decide,
    engine_key,
    is_loopback,
    read_access,
    variable,
)

TOKENS: dict[Role, str] = {role: secrets.token_urlsafe(32) for role in ROLES}
LOCKED = Access(TOKENS)


def _status(needs: Role, authorization: str, access: Access = LOCKED, path: str = "/x", host: str = "h:1") -> int:
    asked = RequestHead(path, {"Authorization": authorization, "Host": host})
    return decide(asked, needs=needs, access=access).status


def test_each_role_may_what_the_table_says_and_nothing_else() -> None:
    for needs, has in product(ROLES, ROLES):
        assert _status(needs, f"Bearer {TOKENS[has]}") == (0 if has in MAY[needs] else 403), (needs, has)
    assert MAY["operator"] == {"operator"} and "viewer" not in MAY["node"], "a viewer spends nothing"


def test_without_the_right_token_there_is_only_what_is_open() -> None:
    token = TOKENS["operator"]
    wrong = ["", "Bearer", "Bearer ", token, f"Basic {token}", f"Bearer {token[:-1]}", f"Bearer {token}x"]
    for authorization in wrong:
        assert _status("viewer", authorization) == 401, authorization
    assert _status("viewer", f"bearer {token}") == 0, "the scheme's case does not matter"
    for strange in ("Bearer \udcff", f"Bearer {token}\udc80", "Bearer \ud800"):
        assert _status("viewer", strange) == 401, "bytes that are no text"
    for path in OPEN:
        assert _status("operator", "", path=path) == 0
    message = decide(RequestHead("/x", {"Authorization": "Bearer no"}), needs="node", access=LOCKED).message
    assert "FORAY_NODE_TOKEN" in message and not any(token in message for token in TOKENS.values())


@given(st.text(max_size=60), st.sampled_from(ROLES))
def test_no_other_header_opens_anything(header: str, needs: Role) -> None:
    assert _status(needs, header) == 401 and _status(needs, f"Bearer {header}") == 401


def test_every_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    genuine = hmac.compare_digest

    def noted(given: bytes, expected: bytes) -> bool:
        compared.append(expected)
        return genuine(given, expected)

    monkeypatch.setattr(module.hmac, "compare_digest", noted)
    for authorization in (f"Bearer {TOKENS['viewer']}", "Bearer no", "Basic no", ""):
        compared.clear()
        LOCKED.role_of(authorization)
        assert compared == [token.encode() for token in TOKENS.values()], "all of them, whether or not one has fitted"


@pytest.mark.parametrize("host", ["", "localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:80", "127.8.8.8"])
def test_an_open_service_answers_to_loopback_names(host: str) -> None:
    assert _status("operator", "", Access(), host=host) == 0


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[", "@"])
def test_a_page_that_had_its_name_point_here_is_not_answered(host: str) -> None:
    assert _status("viewer", "", Access(), host=host) == 403
    assert _status("viewer", f"Bearer {TOKENS['viewer']}", LOCKED, host=host) == 0, "with a token the name is no matter"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.7", "example.org", "127.0.0.1.example.org"])
def test_beyond_loopback_a_service_without_tokens_is_refused_with_the_command_that_makes_one(host: str) -> None:
    with pytest.raises(UserError) as caught:
        check_bind(host, Access(), "retriever.host")
    shown = caught.value.render()
    assert "retriever.host" in shown and "foray init run.yaml --secure" in shown and "token_urlsafe" in shown
    check_bind(host, LOCKED, "retriever.host")


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "LOCALHOST.", "::1%lo", "127.1.2.3"])
def test_loopback_needs_no_token(host: str) -> None:
    check_bind(host, Access(), "x")
    assert is_loopback(host)


def test_tokens_come_from_variables_or_from_files_they_name(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKENS["node"] + "\n")
    found = read_access({variable("viewer"): TOKENS["viewer"], f"{variable('node')}_FILE": str(path), "HOME": "/"})
    assert found.tokens == {"viewer": TOKENS["viewer"], "node": TOKENS["node"]}
    assert read_access({variable("viewer"): "  "}).open and read_access({}).open
    assert "Access()" in repr(found) and not any(token in repr(found) for token in TOKENS.values())
    assert found.headers("operator", "node") == {"Authorization": f"Bearer {TOKENS['node']}"}
    assert found.headers("operator") == {} == Access().headers("viewer")


@pytest.mark.parametrize(
    "weak", ["short", "a" * 64, "ab" * 32, "x" * 31 + "yz", f"{'abcdefghij' * 4} {'k' * 9}", "é" * 40]
)
def test_weak_tokens_are_refused_and_not_shown(weak: str) -> None:
    with pytest.raises(UserError, match="FORAY_NODE_TOKEN is too weak") as caught:
        read_access({"FORAY_NODE_TOKEN": weak})
    assert weak not in caught.value.render() and "token_urlsafe" in caught.value.todo


def test_confused_tokens_are_refused(tmp_path: Path) -> None:
    one = TOKENS["node"]
    with pytest.raises(UserError, match="two roles"):
        read_access({"FORAY_NODE_TOKEN": one, "FORAY_VIEWER_TOKEN": one})
    with pytest.raises(UserError, match="both set"):
        read_access({"FORAY_NODE_TOKEN": one, "FORAY_NODE_TOKEN_FILE": "/x"})
    with pytest.raises(UserError, match="cannot read"):
        read_access({"FORAY_NODE_TOKEN_FILE": str(tmp_path / "none")})
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot read"):
        read_access({"FORAY_NODE_TOKEN_FILE": str(tmp_path / "binary")})


@given(st.text(min_size=1, max_size=20), st.text(min_size=1, max_size=20), st.text(max_size=8), st.text(max_size=8))
def test_the_key_of_one_engine_opens_no_other(one: str, other: str, born: str, again: str) -> None:
    keys = {pair: engine_key(LOCKED, *pair) for pair in {(one, born), (other, born), (one, again), (other, again)}}
    if all("\0" not in part for pair in keys for part in pair):
        assert len(set(keys.values())) == len(keys)
    assert not any(TOKENS["node"] in key for key in keys.values())
    assert engine_key(Access(), one, born) == ""
