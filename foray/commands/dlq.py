"""Inspect dead letters, and requeue or purge them.

    foray dlq list [RUN_DIR] [--reason R]       list dead letters and failed seqs, with the state of each
    foray dlq show SEQ|ID ... [RUN_DIR]         show one in full: header, reason, hex dump of its bytes
    foray dlq requeue SEQ ... [RUN_DIR]         retry dead or stale seqs; or --reason R, or --all
    foray dlq purge [RUN_DIR] [--reason R]      delete dead letters from Redis; with --files from the learner's file too

A dead letter is a record of an entry that could not be used. The ledger is authoritative: a seq that it records as dead
(or stale) stays so until it is requeued. The default run is the latest below ./runs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.run.run_dir import Located, locate
from protocol.errors import UserError

if TYPE_CHECKING:
    import redis

    from foray.watch.dead_letters import DeadLetter, Fates

_SEQ, _ID = re.compile(r"^[0-9]{1,18}$"), re.compile(r"^[0-9]{1,16}-[0-9]{1,20}$")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray dlq`."""
    parser.add_argument("action", choices=[*_READING, *_WRITING], help="action")
    parser.add_argument("rest", nargs="*", metavar="SEQ|ID|RUN_DIR|CONFIG", help="seqs or ids, and the run")
    parser.add_argument("--config", type=Path, metavar="CONFIG", help="the same as the positional CONFIG")
    parser.add_argument("--reason", default="", help="only dead letters with this reason, e.g. corrupt")
    parser.add_argument("--all", action="store_true", help="requeue: every dead seq")
    parser.add_argument(
        "--files", action="store_true", help="purge: also delete them from the learner's dead_letters.jsonl"
    )
    parser.add_argument("--yes", action="store_true", help="purge: do not ask for confirmation")
    parser.add_argument("--bytes", type=int, default=256, help="show: bytes of the body to print (default: 256)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Return 0 on success. Raises UserError for an action that is not possible."""
    wanted = [text for text in args.rest if _SEQ.match(text) or _ID.match(text)]
    args.given = [text for text in args.rest if text not in wanted]
    found = locate(args)
    with _client(found, may_be_gone=args.action in _READING) as client:
        if args.action in _READING:
            _READING[args.action](args, found, client, wanted)
        elif client is not None:
            _WRITING[args.action](args, found, client, wanted)
    return 0


@contextmanager
def connected(found: Located) -> Iterator[redis.Redis]:
    """Yield a client of the run's Redis. Raises UserError if it is not usable, or has another run."""
    with _client(found, may_be_gone=False) as client:
        assert client is not None
        yield client


@contextmanager
def _client(found: Located, *, may_be_gone: bool) -> Iterator[redis.Redis | None]:
    import redis

    from deploy.run.redis_server import connect
    from deploy.run.snapshot import refuse_stranger
    from protocol.runtime.redis.url import redacted

    with connect(found.redis_url) as client:
        try:
            gone = may_be_gone and _is_gone(client, found)
            if not gone:
                refuse_stranger(client, found.redis_url, found.run.id, found.directory)
            yield None if gone else client
        except (redis.RedisError, OSError) as error:
            raise UserError(
                f"the Redis at {redacted(found.redis_url)} is not usable: {type(error).__name__}: {error}",
                todo="start it, or check its memory and this user's permissions with `foray doctor`",
            ) from None


def _is_gone(client: redis.Redis, found: Located) -> bool:
    """Return whether Redis is unreachable, as after the end of a run, and the run directory can be read instead."""
    import redis

    try:
        client.ping()
    except (redis.AuthenticationError, redis.BusyLoadingError):
        raise  # Redis answers; redis-py reports both errors as lost connections
    except (redis.ConnectionError, redis.TimeoutError, OSError):
        if not found.directory.is_dir():
            raise
        text = f"Redis does not answer: these are the dead letters that the learner wrote to {found.directory}"
        print(text, file=sys.stderr)
        return True
    return False


def _fates(found: Located, client: redis.Redis | None) -> Fates:
    from deploy.run.snapshot import read_ledger
    from foray.watch.dead_letters import Fates
    from protocol.codec import number_of
    from protocol.keys import Keys

    members: Any = client.smembers(Keys(found.run.id).requeue) if client is not None else ()
    return Fates(read_ledger(found.directory), frozenset(seq for raw in members if (seq := number_of(raw))))


def _letters(
    args: argparse.Namespace, found: Located, client: redis.Redis | None, wanted: list[str], *, bodies: bool = False
) -> list[DeadLetter]:
    """Return the dead letters with the reason of --reason, and with a seq or id of `wanted`, if any is given."""
    from foray.watch.dead_letters import read_letters

    letters = read_letters(client, found.run.id, found.directory, bodies=bodies)
    letters = [letter for letter in letters if not args.reason or letter.reason == args.reason]
    return [letter for letter in letters if not wanted or letter.id in wanted or str(letter.seq) in wanted]


def _list(args: argparse.Namespace, found: Located, client: redis.Redis | None, wanted: list[str]) -> None:
    from foray.watch.dead_letter_pages import as_json, listing

    letters, fates = _letters(args, found, client, wanted), _fates(found, client)
    if args.json:
        print(_json(as_json(found.run.id, letters, fates, reason=args.reason)))
    else:
        print("\n".join(listing(letters, fates, reason=args.reason)))


def _show(args: argparse.Namespace, found: Located, client: redis.Redis | None, wanted: list[str]) -> None:
    from deploy.terminal import escape_untrusted
    from foray.watch.dead_letter_pages import as_json, page

    if not wanted:
        raise UserError("no seq or id is given", todo="`foray dlq list` shows them; then foray dlq show SEQ")
    letters, fates = _letters(args, found, client, wanted, bodies=True), _fates(found, client)
    recorded = [int(text) for text in wanted if _SEQ.match(text) and int(text) in fates.reopenable]
    if not letters and not recorded:
        raise UserError(f"no dead letter found for {', '.join(wanted)}", todo="`foray dlq list` shows all of them")
    if args.json:
        print(_json(as_json(found.run.id, letters, fates, bodies=True)))
        return
    for seq in recorded:
        print(f"seq {seq} is recorded as {fates.of(seq)}: {escape_untrusted(fates.reopenable[seq])}")
    for letter in letters:
        print("\n".join(page(letter, fates, most=max(0, args.bytes))))


def _requeue(args: argparse.Namespace, found: Located, client: redis.Redis, wanted: list[str]) -> None:
    from deploy.run.snapshot import take_snapshot
    from foray.watch.dead_letters import choose, outlook
    from protocol.keys import Keys

    if sum((bool(wanted), bool(args.reason), args.all)) != 1:
        raise UserError("requeue needs one selection of seqs", todo="give one of SEQ ..., --reason R and --all")
    if any(not _SEQ.match(text) for text in wanted):
        raise UserError("entry ids cannot be requeued", todo="give seqs; `foray dlq list` shows them")
    seen = take_snapshot(found.redis_url, found.run.id, found.directory)
    seqs = choose(seen, _fates(found, client), [int(text) for text in wanted], reason=args.reason)
    if seqs:
        client.sadd(Keys(found.run.id).requeue, *map(str, seqs))
        _tell(client, found, "requeue-asked", f"{len(seqs)} seqs: {', '.join(map(str, seqs[:20]))}")
    if args.json:
        print(_json({"run": found.run.id, "requeued": seqs}))
    else:
        print(outlook(seen, seqs))


def _purge(args: argparse.Namespace, found: Located, client: redis.Redis, wanted: list[str]) -> None:
    from deploy.run.snapshot import take_snapshot
    from foray.watch.dead_letters import purge_file, purge_stream

    letters = _letters(args, found, client, wanted)
    if args.files and take_snapshot(found.redis_url, found.run.id, found.directory).lease_ms:
        raise UserError(
            "the learner is running and may be writing its file", todo="stop it first, or purge without --files"
        )
    held = sum("redis" in letter.kept for letter in letters), sum("file" in letter.kept for letter in letters)
    entry = f"{held[0]} dead letters in Redis" + (f" and {held[1]} in {found.directory}" if args.files else "")
    if not args.yes and any(held):
        _confirm(f"delete {entry}? The ledger is not changed. [yes/no] ")
    removed = purge_stream(client, found.run.id, letters)
    lines = purge_file(found.directory, letters) if args.files else 0
    _tell(client, found, "purged", f"{removed} dead letters in Redis, {lines} in the learner's file")
    if args.json:
        print(_json({"run": found.run.id, "removed": removed, "removed_lines": lines}))
    else:
        kept = "" if args.files else f"; {held[1]} remain in the learner's file"
        print(f"{removed} dead letters deleted from Redis" + (f", {lines} from the file" if args.files else kept))


def _tell(client: redis.Redis, found: Located, kind: str, text: str) -> None:
    """Record a user action in the run's event log."""
    from socket import gethostname

    from protocol import events
    from protocol.keys import Keys

    entry: Any = events.fields("operator", f"{os.environ.get('USER', os.getuid())}@{gethostname()}", kind, text)
    client.xadd(Keys(found.run.id).events, entry, maxlen=events.MOST, approximate=True)


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise UserError("cannot ask for confirmation: no terminal", todo="add --yes")
    if input(question).strip().lower() not in ("y", "yes"):
        raise UserError("nothing was purged")


def _json(entry: dict[str, Any]) -> str:
    """Return one line of printable ASCII: json escapes all control characters except DEL."""
    return json.dumps(entry).replace("\x7f", "\\u007f")


_READING = {"list": _list, "show": _show}
_WRITING = {"requeue": _requeue, "purge": _purge}
