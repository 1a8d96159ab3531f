"""`foray dlq`: dead letters of both writers, hostile ones on a terminal, and what may be requeued."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import redis

from deploy.terminal import escape_untrusted, hexdump
from foray.cli import main
from protocol.codec import encode
from protocol.errors import CorruptMessage
from protocol.header import seal
from protocol.keys import Keys
from protocol.ledger import Ledger, Outcome
from protocol.messages import MetricsSnapshot, WeightUpdate
from protocol.runtime.redis.aio import RedisClient
from rollout_server.dispatch.publisher import GroupPublisher
from rollout_server.metrics import Stats
from tests.support.messages import make_group

KEYS = Keys("test")
HOSTILE = "\x1b]0;gotcha\x07\x1b[2J\u202egnp.exe\r\n\x9b31m\x7f"
"""Sets a terminal's title, clears it, turns the direction of writing, starts a new line, and an 8-bit CSI."""


class Run:
    """A run directory as `foray up` leaves it, with a learner's checkpoint and file of dead letters."""

    def __init__(self, directory: Path, url: str, client: redis.Redis) -> None:
        self.directory, self.client = directory, client
        (directory / "run.json").write_text('{"state": "running"}')
        (directory / "resolved.yaml").write_text(f"run: {{id: test, redis_url: '{url}'}}\n")

    def checkpoint(self, **outcomes: tuple[int, ...]) -> None:
        """`trained=(1, 2), dead=(3,)`; dead seqs have the reason `engine`, but for those beyond 8: `poison`."""
        ledger = Ledger()
        for name, seqs in outcomes.items():
            for seq in seqs:
                ledger.settle(seq, Outcome(name), "" if name == "trained" else "poison" if seq > 8 else "engine")
        path = self.directory / "checkpoints" / "step_9.e1"
        path.mkdir(parents=True, exist_ok=True)
        (path / "manifest.json").write_text(json.dumps({"step": 9, "epoch": 1, "ledger": ledger.to_state()}))
        (self.directory / "checkpoints" / "CURRENT").write_text("step_9.e1\n")

    def letter(self, seq: int, reason: str, detail: str = "", *, h: bytes = b"", b: bytes = b"", id_: str = "") -> None:
        """One of the learner's: in its file, and in Redis."""
        id_ = id_ or f"17637{seq:08d}-0"
        facts = {"id": id_, "seq": seq, "reason": reason, "detail": detail, "from": "learner"}
        line = facts | {"h": base64.b64encode(h).decode(), "b": base64.b64encode(b).decode()}
        with (self.directory / "dead_letters.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.client.xadd(KEYS.dlq, facts | {"h": h, "b": b})

    def foray(self, *argv: str) -> int:
        return main(["dlq", *argv, str(self.directory)])


@pytest.fixture
def run(tmp_path: Path, redis_url: str, client: redis.Redis) -> Run:
    return Run(tmp_path, redis_url, client)


def output(capsys: pytest.CaptureFixture[str]) -> str:
    """The output, which must be plain text for any content of the dead letters."""
    out, err = capsys.readouterr()
    for text in (out, err):
        assert all(c.isprintable() or c == "\n" for c in text), repr(text)
    return out + err


async def test_letters_of_both_writers_are_listed_once_with_what_became_of_their_seqs(
    run: Run, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run.checkpoint(trained=(1, 2), dead=(3, 4), stale=(5,))
    run.letter(2, "corrupt", "not msgpack")  # generated again, and trained
    run.letter(3, "foreign_run", "of run 'b'")
    run.letter(6, "invalid_body", "a hole")
    server = RedisClient(redis_url, KEYS)
    await GroupPublisher(server, Stats("rollout", "r1")).dead_letter(
        "1763799999999-0", None, b"\xc1", CorruptMessage("bad"), "test"
    )
    await server.aclose()
    assert run.foray("list") == 0
    lines = output(capsys).splitlines()
    rows = {line.split()[0]: line.split()[1:4] for line in lines[1:-2]}
    assert rows == {
        "2": ["trained", "corrupt", "learner"],
        "3": ["dead", "foreign_run", "learner"],
        "6": ["open", "invalid_body", "learner"],
        "-": ["unknown", "task_corrupt", "r1"],
        "4": ["dead", "engine", "ledger"],
    }
    assert lines[-1] == "2 seqs recorded as dead: 2 engine" and lines[-2].startswith("4 dead letters: ")
    assert run.foray("list", "--reason", "corrupt", "--json") == 0
    (letter,) = json.loads(output(capsys))["letters"]
    assert (letter["seq"], letter["fate"], letter["kept"]) == (2, "trained", ["redis", "file"])


@pytest.mark.fault(30)
def test_a_hostile_letter_is_shown_and_does_nothing_to_the_terminal(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    header, body = seal(make_group(7, run="test"))
    run.letter(7, HOSTILE, HOSTILE, h=header, b=body[:50] + HOSTILE.encode(), id_=HOSTILE)
    run.letter(8, "corrupt", h=b"\xff" * 9, b=b"\x1b[31m")
    assert run.foray("list") == 0
    assert r"\x1b]0;gotcha\x07" in output(capsys)
    assert run.foray("show", "7") == 0
    page = output(capsys)
    assert r"\x1b[2J\u202egnp.exe\x0d\x0a\x9b31m\x7f" in page and "header    seq = 7" in page
    assert "checked   corrupt: seq 7: the checksum" in page and "|" in page
    assert run.foray("show", "8", "--bytes", "4") == 0
    page = output(capsys)
    assert "1b 5b 33 31" in page and "|.[31|" in page and "... 1 bytes more" in page
    assert run.foray("show", "7", "--json") == 0
    (letter,) = json.loads(output(capsys))["letters"]
    assert letter["detail"] == HOSTILE and base64.b64decode(letter["h"]) == header


def test_escapes_are_unambiguous() -> None:
    assert escape_untrusted("\x1b") == r"\x1b" and escape_untrusted(r"\x1b") == r"\\x1b"
    assert escape_untrusted("\u2028\U000e0001 schön") == r"\u2028\U000e0001 schön"
    assert escape_untrusted("a" * 300, 3) == "aaa... (300 characters)"
    assert [line.split() for line in hexdump(b"abc\x00")] == [["000000", "61", "62", "63", "00", "|abc.|"]]


def test_a_file_that_a_crash_cut_and_older_letters_are_still_read(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.letter(3, "corrupt")
    with (run.directory / "dead_letters.jsonl").open("a") as file:
        file.write('["no letter"]\n{"id": "17637-0", "seq": 4, "reason": "cut sh')
    run.client.xadd(KEYS.dlq, {"reason": "task_corrupt", "seq": "None", "from": "old", "raw": b"\xc1"})
    assert run.foray("list", "--json") == 0
    letters = json.loads(output(capsys))["letters"]
    assert [(x["seq"], x["reason"], x["from"]) for x in letters] == [
        (3, "corrupt", "learner"),
        (0, "task_corrupt", "old"),
    ]


def test_dead_seqs_are_requeued_by_number_by_reason_or_all(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.checkpoint(trained=(1, 2), dead=(3, 4, 9), stale=(5,))
    assert run.foray("requeue", "4") == 0
    assert "1 seqs requeued: 4" in (text := output(capsys)) and "No learner is running" in text
    assert run.client.smembers(KEYS.requeue) == {b"4"}
    ((_, event),) = run.client.xrange(KEYS.events)
    assert (event[b"process"], event[b"kind"], event[b"text"]) == (b"operator", b"requeue-asked", b"1 seqs: 4")
    assert run.foray("list") == 0 and "4    requeued" in output(capsys)
    assert run.foray("requeue", "--reason", "poison", "--json") == 0
    assert json.loads(output(capsys))["requeued"] == [9]
    snapshot = MetricsSnapshot(process="learner", id="0", uptime_s=1.0)
    run.client.set(KEYS.metrics("learner", "0"), encode(snapshot))
    run.client.zadd(KEYS.processes, {"learner:0": run.client.time()[0] + 60})
    assert run.foray("requeue", "--all") == 0
    assert "requeued: 3\nThe learner reopens them" in output(capsys)
    assert run.client.smembers(KEYS.requeue) == {b"3", b"4", b"9"}
    assert run.foray("requeue", "5") == 0, "a stale one too, when it is named"
    assert run.client.sismember(KEYS.requeue, "5") and output(capsys)
    assert run.foray("requeue", "--all") == 0 and "nothing to requeue" in output(capsys)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("requeue", "2"), "2 is trained or filtered"),
        (("requeue", "3", "6", "77"), "6 is trained or filtered, 77 is open"),
        (("requeue", "--reason", "typo"), "no dead or stale seq has the reason 'typo'"),
        (("requeue",), "requeue needs one selection of seqs"),
        (("requeue", "3", "--all"), "requeue needs one selection of seqs"),
        (("requeue", "17-0"), "entry ids cannot be requeued"),
        (("show", "77"), "no dead letter found for 77"),
        (("purge",), "cannot ask for confirmation"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(
    run: Run, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    run.checkpoint(trained=(1, 2), dead=(3, 4), stale=(5,), filtered=(6,))
    run.letter(3, "corrupt")
    assert run.foray(*argv) == 2
    assert words in output(capsys)
    assert run.client.scard(KEYS.requeue) == 0 and run.client.xlen(KEYS.dlq) == 1, "nothing was done"


@pytest.mark.fault(50)
def test_a_run_that_is_done_takes_nothing_back(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.checkpoint(dead=(1,))
    update = WeightUpdate(run="test", epoch=1, step=9, digest="d", path="/w")
    run.client.hset(KEYS.target, mapping={"b": encode(update), "state": "done"})
    assert run.foray("requeue", "1") == 2
    assert "the run is done" in output(capsys) and run.client.scard(KEYS.requeue) == 0


def test_before_the_first_checkpoint_nothing_is_known_to_be_dead(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.foray("requeue", "1") == 2 and "there is no checkpoint yet" in output(capsys)


def test_a_wrong_password_is_no_end_of_the_run(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    resolved = run.directory / "resolved.yaml"
    resolved.write_text(resolved.read_text().replace("unix://", "unix://default:wrong@"))
    run.client.config_set("requirepass", "right")
    try:
        assert run.foray("list") == 2
    finally:
        run.client.config_set("requirepass", "")
    assert "does not answer" not in capsys.readouterr().err


def test_a_purge_forgets_evidence_and_only_with_files_the_learners_record(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    for seq, reason in ((1, "corrupt"), (2, "corrupt"), (3, "foreign_run")):
        run.letter(seq, reason)
    lines = (run.directory / "dead_letters.jsonl").read_text().splitlines()
    assert run.foray("purge", "--reason", "corrupt", "--yes") == 0
    assert "2 dead letters deleted from Redis; 2 remain in the learner's file" in output(capsys)
    assert run.client.xlen(KEYS.dlq) == 1
    assert (run.directory / "dead_letters.jsonl").read_text().splitlines() == lines
    run.client.hset(KEYS.lease, mapping={"epoch": 1, "token": "t"})
    run.client.pexpire(KEYS.lease, 60_000)
    assert run.foray("purge", "--yes", "--files") == 2 and "the learner is running" in output(capsys)
    run.client.delete(KEYS.lease)
    assert run.foray("purge", "--reason", "corrupt", "--yes", "--files") == 0
    assert (run.directory / "dead_letters.jsonl").read_text().splitlines() == lines[2:]
    assert run.foray("purge", "--yes", "--files", "--json") == 0
    assert json.loads(output(capsys).splitlines()[-1]) == {"run": "test", "removed": 1, "removed_lines": 1}


def test_without_redis_it_says_so(tmp_path: Path, client: redis.Redis, capsys: pytest.CaptureFixture[str]) -> None:
    assert Run(tmp_path, "redis://127.0.0.1:1/0", client).foray("requeue", "3") == 2
    assert "is not usable" in output(capsys)


def test_letters_of_a_finished_run_are_read_from_its_directory(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.checkpoint(trained=(1,), dead=(3,))
    run.letter(3, "corrupt", "not msgpack")
    (run.directory / "resolved.yaml").write_text("run: {id: test, redis_url: 'redis://127.0.0.1:1/0'}\n")
    assert run.foray("list", "--json") == 0
    out, err = capsys.readouterr()
    assert [letter["seq"] for letter in json.loads(out)["letters"]] == [3]
    assert "Redis does not answer" in err
    assert run.foray("requeue", "3") == 2, "what changes something needs Redis"
