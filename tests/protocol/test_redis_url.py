"""URLs of Redis: what each form says, what is refused, and that no password is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import UserError
from protocol.runtime.redis.url import parse_redis_url, place_of, redacted, with_login


def test_each_form_says_where_redis_is() -> None:
    assert (
        parse_redis_url("redis://db:7000/3").hosts == (("db", 7000),) and parse_redis_url("redis://db:7000/3").db == 3
    )
    assert parse_redis_url("redis://db").hosts == (("db", 6379),) and parse_redis_url("redis://db?db=2").db == 2
    assert parse_redis_url("redis://").hosts == (("localhost", 6379),)
    assert parse_redis_url("redis://[::1]:7/0").hosts == (("::1", 7),)
    socket = parse_redis_url("unix://u:p@/run/my%20redis.sock?db=1")
    assert (socket.kind, socket.path, socket.db, socket.username) == ("socket", "/run/my redis.sock", 1, "u")
    sentinel = parse_redis_url("redis+sentinel://me:pw@h1,h2:26380/main/4?sentinel_password=other")
    assert sentinel.hosts == (("h1", 26379), ("h2", 26380)) and sentinel.service == "main" and sentinel.db == 4
    assert (sentinel.username, sentinel.password, sentinel.sentinel_password) == ("me", "pw", "other")


def test_tls_verifies_unless_disabled() -> None:
    plain, tls = (
        parse_redis_url("redis://db"),
        parse_redis_url("rediss://db?ssl_ca_certs=/ca.pem&ssl_certfile=/c&ssl_keyfile=/k"),
    )
    assert plain.tls is None and not plain.verifies and tls.verifies
    assert tls.tls is not None and tls.tls["ssl_ca_certs"] == "/ca.pem" and tls.tls["ssl_keyfile"] == "/k"
    assert not parse_redis_url("rediss://db?ssl_cert_reqs=none").verifies
    assert not parse_redis_url("rediss://db?ssl_check_hostname=false").verifies
    assert parse_redis_url("rediss+sentinel://h/main").verifies


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("nonsense", "scheme"),
        ("http://db", "scheme"),
        ("redis://a,b", "redis\\+sentinel"),
        ("redis://db/x", "number"),
        ("redis://db/0/1", "after the host comes"),
        ("redis://db:99999", "range|Port"),
        ("redis://db:port", "cast|invalid|Port"),
        ("unix://", "path"),
        ("redis+sentinel://h1,h2", "name of the primary"),
        ("redis+cluster://h1,h2", "Cluster is not supported.*Sentinels"),
        ("redis://db?socket_timeout=0", "unknown option 'socket_timeout'"),
        ("redis://db?retry_on_timeout=true", "unknown option"),
        ("redis://db?password=geheim", "unknown option 'password'"),
        ("redis://db?ssl_ca_certs=/ca", "needs TLS"),
        ("rediss://db?ssl_cert_reqs=maybe", "`required` or `none`"),
        ("rediss://db?ssl_check_hostname=perhaps", "true or false"),
        ("redis://db?sentinel_password=x", "redis\\+sentinel"),
        ("redis+sentinel://:geheim@h1,,h2/m", "not host:port"),
        ("redis://db?", None),
    ],
)
def test_what_cannot_be_meant_is_refused_with_its_reason(url: str, words: str | None) -> None:
    if words is None:
        assert parse_redis_url(url).hosts == (("db", 6379),)
        return
    with pytest.raises(UserError, match="is not a Redis URL") as caught:
        parse_redis_url(url)
    import re

    assert re.search(words, caught.value.why), caught.value.why
    assert "geheim" not in caught.value.render() + str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://me:geheim@db:6379/0", "redis://me:[secret]@db:6379/0"),
        ("redis://:geheim@db", "redis://:[secret]@db"),
        ("redis://db:6379/0", "redis://db:6379/0"),
        ("redis://me@db", "redis://me@db"),
        ("redis://me:ge@he/im@db/0", "redis://me:[secret]@db/0"),
        ("rediss+sentinel://me:geheim@h1,h2/m?sentinel_password=geheim", "rediss+sentinel://me:[secret]@h1,h2/m?sentinel_password=[secret]"),
        ("unix://me:geheim@/run/r.sock?db=1", "unix://me:[secret]@/run/r.sock?db=1"),
        ("redis://db?password=geheim&db=1", "redis://db?password=[secret]&db=1"),
    ],
)  # fmt: skip
def test_a_password_is_not_shown(url: str, shown: str) -> None:
    assert redacted(url) == shown


@given(st.text("ab@/?:#&%= ", max_size=12), st.text("ab@/?:#&%= ", max_size=12))
def test_not_even_a_password_that_was_not_quoted_is_shown(before: str, after: str) -> None:
    for form in ("redis://me:{}@db:6379/0", "unix://me:{}@/r.sock?db=1", "redis+sentinel://h1/m?sentinel_password={}"):
        if "sentinel" not in form or "&" not in before:
            assert "geheim" not in redacted(form.format(f"{before}geheim{after}"))


def test_a_parsed_url_does_not_show_it_either() -> None:
    assert "geheim" not in repr(parse_redis_url("redis+sentinel://me:geheim@h/m?sentinel_password=geheim"))


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.8.9.1"])
def test_loopback_stays_on_this_machine(host: str) -> None:
    assert parse_redis_url(f"redis://{host}:1").is_loopback and parse_redis_url("unix:///r").is_loopback
    assert (
        not parse_redis_url(f"redis+sentinel://{host}:1,db/m").is_loopback
        and not parse_redis_url("redis://localhost.evil.example").is_loopback
    )


@given(st.text(st.characters(codec="utf-8"), min_size=1), st.text(st.characters(codec="utf-8"), min_size=1))
def test_a_login_comes_back_whatever_is_in_it(user: str, password: str) -> None:
    for url in ("redis://x:y@db:1/2", "unix:///r.sock?db=1", "rediss+sentinel://h1:1,h2/main"):
        made = parse_redis_url(with_login(url, user, password))
        assert (made.username, made.password) == (user, password)
        assert place_of(with_login(url, user, password)) == place_of(url)
        assert (
            made.hosts == parse_redis_url(url).hosts
            and made.path == parse_redis_url(url).path
            and made.service == parse_redis_url(url).service
        )


@given(st.text(st.characters(codec="utf-8"), max_size=60))
def test_any_text_is_a_url_or_a_users_error(text: str) -> None:
    for url in (text, f"redis://{text}", f"redis+sentinel://{text}"):
        try:
            parse_redis_url(url)
        except UserError as error:
            assert error.what and error.why
        redacted(url)
