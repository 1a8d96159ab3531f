"""The rules for requests other than tokens."""

from __future__ import annotations

from protocol.runtime.http.auth import PASS, RequestHead, check_request


def test_a_call_without_a_body_needs_no_type() -> None:
    """As SGLang's clients call /flush_cache; a page that does it is known by its origin."""
    for length in ("", "0"):
        bare = {"Host": "localhost", "Content-Length": length}
        assert check_request(RequestHead("/flush_cache", bare), is_open=True) == PASS
        evil = bare | {"Origin": "https://evil.example"}
        assert check_request(RequestHead("/flush_cache", evil), is_open=True).status == 403


def test_with_a_key_none_of_these_rules_apply() -> None:
    strange = {"Host": "gpu7", "Origin": "http://x.example", "Content-Type": "text/plain", "Content-Length": "2"}
    assert check_request(RequestHead("/x", strange), is_open=False) == PASS
    packed = strange | {"Content-Encoding": "gzip"}
    assert check_request(RequestHead("/x", packed), is_open=False).status == 415
