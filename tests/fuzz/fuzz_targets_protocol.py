"""Decoders of `protocol`: the wire, headers, versions, ledger, settings, and events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgpack
from fuzz_targets import Decoder, scratch

from protocol import codec, events
from protocol.errors import ForayError, ProtocolError, UserError
from protocol.header import check_body, read_header, seal
from protocol.ledger import Ledger, Outcome
from protocol.messages import GroupFailed
from protocol.runtime.config import read_tree, section
from protocol.runtime.http.auth import Access, RequestHead, check_request, decide, is_loopback
from protocol.runtime.redis import url as redis_url
from protocol.settings import RunSettings
from protocol.versions import PolicyVersion
from tests.support.messages import make_group, make_task

TOKEN = "fuzz-0123456789-abcdefghijklmnopqrstuvw"
REDIS_URLS = (
    b"redis://user:secret@host:6379/1",
    b"rediss+sentinel://u:p@h1:26379,h2/name/0?sentinel_password=x",
    b"unix:///run/redis.sock?db=1",
)
GOLDEN = sorted((Path(__file__).parent.parent / "golden").glob("*.msgpack"))


def messages() -> tuple[bytes, ...]:
    """Valid messages of every kind and age, one of them larger."""
    big = make_group(3, (1.0, 0.5, 0.0), version=PolicyVersion(2, 41))
    return (*(path.read_bytes() for path in GOLDEN), codec.encode(big), codec.encode(make_task(7)))


def entries() -> tuple[bytes, ...]:
    """Valid entries of the trajectory stream: msgpack of {seq, h, b}."""
    failed = GroupFailed(run="test", seq=9, attempt=3, question_id="q", reason="no_engine")
    groups = [make_group(3, (1.0, 0.0), version=PolicyVersion(2, 41)), failed]
    sealed = [(g.seq, *seal(g)) for g in groups]
    return tuple(msgpack.packb({"seq": str(seq).encode(), "h": h, "b": b}) for seq, h, b in sealed)


def resealed(raw: bytes) -> bytes:
    """An entry whose header fits its body again, as far as there are both."""
    try:
        entry: Any = msgpack.unpackb(raw, raw=False)
        header = msgpack.unpackb(entry["h"], raw=False)
        header |= {"num_bytes": len(entry["b"]), "crc": codec.checksum(entry["b"])}
        packed: bytes = msgpack.packb(entry | {"h": msgpack.packb(header)})
        return packed
    except Exception:  # not an entry any more: it is fed as it is
        return raw


def _header_and_body(raw: bytes) -> object:
    entry = codec.unpack(raw)
    if not isinstance(entry, dict) or not isinstance(entry.get("h"), bytes) or not isinstance(entry.get("b"), bytes):
        raise ProtocolError("not an entry")
    header = read_header(entry["h"])
    check_body(header, entry["b"])
    return header


def _books(raw: bytes) -> object:
    try:
        state = json.loads(raw)
    except (ValueError, RecursionError):
        raise ForayError("not JSON") from None
    return Ledger.from_state(state)


def _tree(folder: Path) -> Any:
    path = folder / "run.yaml"

    def read(raw: bytes) -> object:
        path.write_bytes(raw)
        return section(read_tree(path), "run", RunSettings)

    return read


def _override(raw: bytes) -> object:
    return section(read_tree(None, [raw.decode("utf-8", "surrogateescape")]), "run", RunSettings)


def _event(raw: bytes) -> object:
    return events.parse({b"process": raw[:10], b"id": raw[10:12], b"text": raw})


def _version(raw: bytes) -> object:
    return PolicyVersion.parse(raw.decode("utf-8", "surrogateescape"))


def _access(access: Access) -> Any:
    def read(raw: bytes) -> object:
        # as aiohttp hands headers over
        text = raw.decode("utf-8", "surrogateescape")
        asked = RequestHead("/retrieve", {"Authorization": text, "Host": "localhost"})
        verdict = decide(asked, needs="node", access=access)
        assert verdict.status or raw == f"Bearer {TOKEN}".encode() or access.open or TOKEN in text
        names = ("Host", "Origin", "Sec-Fetch-Site", "Content-Encoding", "Content-Length", "Content-Type")
        others = [check_request(RequestHead("/retrieve", {name: text}), is_open=access.open) for name in names]
        return verdict, others, is_loopback(text)

    return read


def _redis(raw: bytes) -> object:
    text = raw.decode("utf-8", "surrogateescape")
    redis_url.redacted(text)
    return redis_url.parse_redis_url(text)


def decoders() -> tuple[Decoder, ...]:
    folder = scratch()
    ledger = Ledger()
    for seq, outcome in ((1, Outcome.TRAINED), (2, Outcome.DEAD), (5, Outcome.STALE)):
        ledger.settle(seq, outcome, "why")
    headers = tuple(msgpack.unpackb(raw, raw=False)["h"] for raw in entries())
    tree = b"run: {id: a, dir: runs/a, group_size: 8, temperature: 1.0}\nlearner: {lr: 1e-4}\nrollout: &x {a: *y}\n"
    whole = tree.replace(b"&x {a: *y}", b"{}")
    return (
        Decoder("codec.decode", codec.decode, (ProtocolError,), messages(), "msgpack", share=6),
        Decoder("codec.unpack", codec.unpack, (ProtocolError,), messages(), "msgpack", share=3),
        Decoder("header.read_header", read_header, (ProtocolError,), headers, "msgpack", share=3),
        Decoder("header.check_body", _header_and_body, (ProtocolError,), entries(), "msgpack", resealed, share=2),
        Decoder("ledger.from_state", _books, (ForayError,), (json.dumps(ledger.to_state()).encode(),), "json", share=2),
        Decoder("versions.parse", _version, (), (b"3.120", b"default"), "text"),
        Decoder("events.parse", _event, (), (b"learner   l started",), "text"),
        Decoder("access.open", _access(Access()), (), (b"localhost:80", b"[::1]:3"), "text"),
        Decoder("access.token", _access(Access({"node": TOKEN})), (), (f"Bearer {TOKEN}".encode(),), "text"),
        Decoder("redis_url.parse", _redis, (UserError,), REDIS_URLS, "text"),
        Decoder("settings.tree", _tree(folder), (UserError,), (whole,), "text", share=0.3),
        Decoder("settings.override", _override, (UserError,), (b"run.id=a", b"run.steps=3"), "text", share=0.5),
    )
