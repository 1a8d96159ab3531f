"""`foray status` and `foray top` of a run, from a real Redis with data as the processes write it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import redis

from deploy.run.run_dir import write_record
from deploy.run.snapshot import RunSnapshot, read_ledger, read_ledger_totals, take_snapshot
from foray.commands.watch import status as status_command
from foray.commands.watch import top as top_command
from foray.watch.status import BUCKETS, problems, seq_balance, state, to_json, with_record
from foray.watch.status_page import render
from foray.watch.top import frame, waits_in_words
from learner.delivery.token_accounting import TokenOutcome
from learner.observability import metric_table
from protocol import events
from protocol.codec import encode
from protocol.errors import ForayError
from protocol.keys import TASK_GROUP, TRAJ_GROUP, Keys
from protocol.ledger import Ledger, Outcome
from protocol.messages import EngineInfo, MetricsSnapshot, NodeState, WeightUpdate
from protocol.runtime.redis.url import redacted_override

KEYS = Keys("test")
LEARNER = {"step": 12.0, "steps": 100.0, "issued": 20.0, "trained": 15.0, "filtered": 1.0, "stale": 0.0, "dead": 1.0}
LEARNER |= {"in_flight": 3.0, "lag_mean": 0.5, "lag_max": 2.0, "tokens_trained_per_s": 1234.0, "reward_mean": 0.25}


def report(client: redis.Redis, process: str, name: str, *, alive: bool = True, **fields: object) -> None:
    """A process's snapshot, as that process would write it."""
    snapshot = MetricsSnapshot(process=process, id=name, **{"uptime_s": 10.0} | fields)  # type: ignore[arg-type]
    client.set(KEYS.metrics(process, name), encode(snapshot))
    client.zadd(KEYS.processes, {f"{process}:{name}": client.time()[0] + (60 if alive else -60)})


def test_the_balance_reads_every_outcome_by_the_name_that_the_learner_gives_it() -> None:
    assert (*TokenOutcome, "in_flight") == BUCKETS
    assert {
        "token_accounting_*",
        "token_accounting_in_flight",
        "token_accounting_redis_lost",
    } < metric_table.LEARNER.keys()


def engine(
    client: redis.Redis, name: str, *, state: NodeState = NodeState.READY, step: int = 12, **more: object
) -> None:
    info = EngineInfo(id=name, url="http://127.0.0.1:1", state=state, epoch=1, step=step, **more)  # type: ignore[arg-type]
    client.hset(KEYS.engine(name), "b", encode(info))
    client.zadd(KEYS.engines, {name: client.time()[0] + 60})


def fill(client: redis.Redis) -> None:
    """A healthy run: three tasks, one of them leased; two groups, one of them read."""
    report(client, "learner", "l", values=LEARNER, waits={"data": 8.0, "compute": 1.0}, text={"state": "training"})
    report(
        client,
        "rollout",
        "rollout-1",
        values={"groups_in_flight": 4.0, "tokens_generated_per_s": 500.0, "searches": 7.0},
    )
    report(client, "rollout", "gone", alive=False)
    engine(client, "engine-1", running=3, tokens_per_s=480.0)
    update = WeightUpdate(run="test", epoch=1, step=12, digest="d", path="/w")
    client.hset(KEYS.target, mapping={"b": encode(update), "state": "ready"})
    client.set(KEYS.issued, 20)
    client.hset(KEYS.lease, mapping={"epoch": 1, "token": "t"})
    client.pexpire(KEYS.lease, 60_000)
    for stream, group, count in ((KEYS.tasks, TASK_GROUP, 3), (KEYS.traj, TRAJ_GROUP, 2)):
        for seq in range(count):
            client.xadd(stream, {"seq": seq, "b": b"-"})
        client.xreadgroup(group, "c", {stream: ">"}, count=1)


@pytest.fixture
def look(client: redis.Redis, redis_url: str, tmp_path: Path) -> Callable[[], RunSnapshot]:
    fill(client)
    return lambda: take_snapshot(redis_url, "test", tmp_path)


def write_checkpoint(run_dir: Path, ledger: Ledger, step: int = 9) -> None:
    path = run_dir / "checkpoints" / f"step_{step}.e1"
    path.mkdir(parents=True)
    manifest = {"step": step, "epoch": 1, "ledger": ledger.to_state(), "lineage": [[1, 0]]}
    (path / "manifest.json").write_text(json.dumps(manifest))
    (run_dir / "checkpoints" / "CURRENT").write_text(f"step_{step}.e1\n")


def test_a_run_that_goes_well_is_healthy_and_its_parts_are_counted(look: Callable[[], RunSnapshot]) -> None:
    seen = look()
    assert problems(seen, max_lag=2) == []
    assert [p.id for p in seen.of("rollout")] == ["rollout-1"], "a process whose time has run out is not listed"
    assert (seen.tasks.waiting, seen.tasks.held) == (2, 1) and (seen.traj.waiting, seen.traj.held) == (1, 1)
    page = render(seen, max_lag=2)
    assert "healthy" in page and "step          12 of 100" in page and "engine-1: ready, version 1.12" in page
    assert "issued 20 = trained 15 + filtered 1 + stale 0 + dead 1 + in flight 3 (learner)" in page


def test_a_run_without_a_signal_names_the_reason_until_the_learner_reports_something_else(
    look: Callable[[], RunSnapshot], client: redis.Redis
) -> None:
    client.xadd(KEYS.events, events.fields("learner", "0", "no-signal", "100 questions in a row failed: 100 no_engine"))
    client.xadd(KEYS.events, events.fields("node", "e", "ready", "an engine is back"))
    seen = look()
    assert problems(seen, max_lag=2)[0].what == "100 questions in a row failed: 100 no_engine"
    failed = with_record(replace(seen, processes=()), {"state": "failed"})
    assert problems(failed, max_lag=2)[0].what == "100 questions in a row failed: 100 no_engine"
    client.xadd(KEYS.events, events.fields("learner", "0", "epoch", "epoch 2 begins"))
    assert problems(look(), max_lag=2) == []


def test_the_json_says_the_same(look: Callable[[], RunSnapshot]) -> None:
    page_json = json.loads(json.dumps(to_json(look(), max_lag=2)))
    assert (
        page_json["healthy"] is True and page_json["state"] == "training" and page_json["target"]["version"] == "1.12"
    )
    assert page_json["streams"] == {
        "tasks_waiting": 2, "tasks_leased": 1, "traj_ready": 1, "traj_unacked": 1, "dead_letters": 0,
    }  # fmt: skip
    assert page_json["ledger"]["closes"] is True and page_json["engines"][0]["state"] == "ready"


def test_a_ledger_that_does_not_add_up_is_shown_as_such(client: redis.Redis, look: Callable[[], RunSnapshot]) -> None:
    report(client, "learner", "l", values=LEARNER | {"in_flight": 2.0})
    totals = seq_balance(look())
    assert not totals.closes and totals.line().startswith("issued 20 != ")


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda c: c.zrem(KEYS.processes, "learner:l"), "no learner is running"),
        (lambda c: c.zrem(KEYS.processes, "rollout:rollout-1"), "no rollout server is running"),
        (lambda c: c.delete(KEYS.engines), "no engine is registered"),
        (
            lambda c: engine(c, "engine-1", state=NodeState.QUARANTINED, detail="digest"),
            "engine-1 is quarantined: digest",
        ),
        (lambda c: engine(c, "engine-1", step=9), "no engine is ready at 1.12"),
        (lambda c: c.hset(KEYS.engine("engine-1"), "b", b"\x00"), "unreadable message: engine-1"),
    ],
)
def test_what_is_wrong_is_named_with_what_to_do(
    client: redis.Redis, look: Callable[[], RunSnapshot], harm: Callable[[redis.Redis], object], words: str
) -> None:
    harm(client)
    found = problems(look(), max_lag=2)
    assert any(words in p.what and p.todo for p in found), found


def test_an_evaluation_engine_is_labelled_and_not_counted_among_those_of_training(
    client: redis.Redis, look: Callable[[], RunSnapshot]
) -> None:
    engine(client, "eval-engine-1", role="eval", step=3)
    seen = look()
    assert problems(seen, max_lag=2) == [], "it may keep its version for as long as an evaluation lasts"
    page = render(seen, max_lag=2)
    assert "eval-engine-1: ready, role eval, version 1.3," in page and "engine-1: ready, version 1.12" in page
    shown = frame(seen, None, {}, max_lag=2).plain().splitlines()
    assert [line.split()[-1] for line in shown if line.split()[1:2] == ["ready"]] == ["rollout", "eval"]
    engine(client, "engine-1", state=NodeState.DRAINING)
    engine(client, "eval-engine-1", role="eval")
    assert [p.what for p in problems(look(), max_lag=2)] == ["no engine is ready at 1.12"]
    client.zrem(KEYS.engines, "engine-1")
    (found,) = problems(look(), max_lag=2)
    assert found.what == "no engine is registered: 1 with role eval serve evaluations only"


def test_an_engine_that_is_loading_is_no_problem(client: redis.Redis, look: Callable[[], RunSnapshot]) -> None:
    engine(client, "engine-1", state=NodeState.LOADING, step=11)
    assert problems(look(), max_lag=2) == []


def test_a_redis_that_is_away_is_a_problem_unless_the_run_was_finished(tmp_path: Path) -> None:
    ledger = Ledger()
    ledger.settle(1, Outcome.TRAINED)
    write_checkpoint(tmp_path, ledger)
    seen = take_snapshot("redis://127.0.0.1:1/0", "test", tmp_path)
    assert seen.error and problems(seen, max_lag=2)
    finished = with_record(seen, {"state": "done"})
    assert problems(finished, max_lag=2) == []
    assert "issued 1 = trained 1" in render(finished, max_lag=2)
    failed = with_record(seen, {"state": "failed", "error": "learner exited with code 65: no training signal"})
    interrupted = with_record(seen, {"state": "interrupted", "error": "learner was stopped by SIGTERM"})
    assert state(interrupted) == "interrupted" and "interrupted: learner" in problems(interrupted, max_lag=2)[0].what
    assert state(failed) == "failed" and "code 65: no training signal" in problems(failed, max_lag=2)[0].what


def test_a_run_that_a_person_stopped_is_stopped_and_not_ill(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Ledger())
    again = "foray up run.yaml run.steps=9"
    away = with_record(take_snapshot("redis://127.0.0.1:1/0", "test", tmp_path), {"state": "stopped", "again": again})
    for seen in (away, with_record(RunSnapshot("test", "redis://x"), {"state": "stopped", "again": again})):
        assert problems(seen, max_lag=2) == []
        page = render(seen, max_lag=2)
        assert "run test: stopped, healthy" in page and f"resume from the checkpoint with {again}" in page


def test_without_a_learner_the_ledger_is_the_checkpoints(
    client: redis.Redis, redis_url: str, tmp_path: Path, look: Callable[[], RunSnapshot]
) -> None:
    ledger = Ledger()
    for seq in (1, 2, 4):
        ledger.settle(seq, Outcome.TRAINED)
    ledger.settle(3, Outcome.DEAD, "why")
    write_checkpoint(tmp_path, ledger)
    client.zrem(KEYS.processes, "learner:l")
    totals = seq_balance(look())
    assert totals.source == "checkpoint" and totals.closes
    assert (totals.issued, totals.trained, totals.dead, totals.in_flight) == (20, 3, 1, 16)


def test_without_a_learner_the_token_balance_is_the_checkpoints(
    client: redis.Redis, redis_url: str, tmp_path: Path, look: Callable[[], RunSnapshot]
) -> None:
    write_checkpoint(tmp_path, Ledger())
    path = tmp_path / "checkpoints" / "step_9.e1" / "manifest.json"
    counted = {"generated": 30, "received": 30, "buckets": {"trained": 20, "stale": 10}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens": counted}))
    client.zrem(KEYS.processes, "learner:l")
    client.hset(KEYS.target, "state", "done")
    line = "generated 30 = trained 20 + masked 0 + filtered 0 + stale 10 + failed 0 + duplicate 0 + in flight 0"
    assert f"{line} (consistent)" in render(look(), max_lag=2)
    counted["buckets"]["stale"] = 110
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokens": counted}))
    assert any(
        "the token accounting is not consistent" in p.what and "100 too many" in p.what
        for p in problems(look(), max_lag=2)
    )


def test_a_ledger_is_parsed_once_for_each_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`foray top` and the dashboard look each second."""
    parsed: list[int] = []
    parse = Ledger.from_state
    monkeypatch.setattr(Ledger, "from_state", lambda state: parsed.append(1) or parse(state))
    ledger = Ledger()
    for seq in range(1, 4):
        write_checkpoint(tmp_path, ledger, step=seq)
        for _ in range(5):
            totals, found = read_ledger_totals(tmp_path), read_ledger(tmp_path)
            assert totals is not None and totals.settled == seq - 1 and found == ledger
        ledger.settle(seq, Outcome.DEAD, "engine")
    assert len(parsed) == 3


def test_a_broken_manifest_is_an_error_and_a_missing_one_is_none(tmp_path: Path) -> None:
    assert read_ledger_totals(tmp_path) is None
    write_checkpoint(tmp_path, Ledger())
    (tmp_path / "checkpoints" / "step_9.e1" / "manifest.json").write_text("{")
    with pytest.raises(ForayError, match="is not JSON"):
        read_ledger_totals(tmp_path)


def test_the_command_finds_the_run_and_its_exit_code_says_whether_it_is_well(
    client: redis.Redis, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(client)
    write_record(tmp_path, {"state": "running"})
    (tmp_path / "resolved.yaml").write_text(f"run: {{id: test, redis_url: '{redis_url}'}}\n")
    args = argparse.Namespace(given=[str(tmp_path)], config=None, json=True)
    assert status_command.run(args) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "test"
    client.delete(KEYS.engines)
    assert status_command.run(args) == 1


def test_top_shows_throughput_lag_reward_engines_and_who_waits(look: Callable[[], RunSnapshot]) -> None:
    text = frame(look(), None, {"foray_retriever_queries_total": 42.0}, max_lag=2).plain()
    for words in (
        "step          12 of 100, weights 1.12",
        "500 generated, 1,234 trained",
        "mean 0.50, max 2 (bound 2)",
        "4 groups",
        "7 searches, 0 failed; retrievers answered 42 queries",
        "80%  the learner waits for trajectories",
    ):
        assert words in text
    assert any(line.split()[:3] == ["engine-1", "ready", "1.12"] for line in text.splitlines())


LAW = {"tokens_generated_total": 100.0, "token_accounting_trained": 60.0, "token_accounting_masked": 5.0}
LAW |= {
    "token_accounting_filtered": 10.0,
    "token_accounting_stale": 4.0,
    "token_accounting_failed": 3.0,
    "token_accounting_duplicate": 8.0,
}
LAW |= {"token_accounting_in_flight": 10.0, "token_accounting_redis_lost": -7.0}


def bury(client: redis.Redis, *reasons: str) -> None:
    for reason in reasons:
        client.xadd(KEYS.dlq, {"id": "1-1", "seq": 1, "reason": reason, "from": "learner", "h": b"", "b": b"\xff"})


def test_token_balance_dead_letters_and_events_are_shown(client: redis.Redis, look: Callable[[], RunSnapshot]) -> None:
    report(client, "learner", "l", values=LEARNER | LAW)
    client.hset(KEYS.tokens, mapping={"published": 100, "rejected": 12, "generation": "26153ed52e87"})
    bury(client, "corrupt", "\x1b[2J")
    for number in range(7):
        client.xadd(KEYS.events, events.fields("rollout", "r1", "left", f"number {number} \x1b[2J"))
    seen = look()
    assert problems(seen, max_lag=2) == [], "two letters are no flood"
    page = render(seen, max_lag=2)
    assert (
        "tokens        generated 100 = trained 60 + masked 5 + filtered 10 + stale 4 + failed 3 + duplicate 8 "
        "+ in flight 10 (consistent); 12 more in retried attempts; "
        "7 received but no longer counted by Redis, since Redis lost state\n" in page
    )
    assert r"dead letters  2 (1 \x1b[2J, 1 corrupt)" in page and "\x1b" not in page
    lines = [line for line in page.splitlines() if line.startswith("event ")]
    assert len(lines) == 5 and lines[-1].endswith(r"rollout r1  left: number 6 \x1b[2J")
    page_json = json.loads(json.dumps(to_json(seen, max_lag=2)))
    assert page_json["tokens"]["closes"] is True and page_json["tokens"]["rejected"] == 12
    assert [e["text"][:8] for e in page_json["events"]] == [f"number {n}" for n in range(2, 7)]
    assert [letter["reason"] for letter in page_json["letters"]] == ["\x1b[2J", "corrupt"]
    assert "+ in flight 10 (consistent)" in frame(seen, None, {}, max_lag=2).plain()


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda c: bury(c, "corrupt", "corrupt", "foreign_run"), "new dead letters: 2 corrupt, 1 foreign_run"),
        (lambda c: c.set(KEYS.epoch, 8), "of epoch 7 is still running, but epoch 8 has taken over"),
        (lambda c: c.delete(KEYS.lease), "the learner's lease has expired"),
        (
            lambda c: report(c, "learner", "l", values=LEARNER | LAW | {"token_accounting_stale": 1.0}),
            "the token accounting is not consistent: generated 100 != trained 60 + masked 5 + filtered 10 + stale 1 + "
            "failed 3 + duplicate 8 + in flight 10 (INCONSISTENT: 3 missing)",
        ),
        (
            lambda c: report(c, "learner", "l", values=LEARNER | {"checkpoint_failures": 2.0, "checkpoint_step": 4.0}),
            "the last 2 checkpoints could not be written; the newest is of step 4",
        ),
        (
            lambda c: report(c, "learner", "l", values=LEARNER | {"checkpoint_every": 3.0, "checkpoint_step": 2.0}),
            "the last checkpoint is 10 steps old, expected at most 3",
        ),
        (
            lambda c: report(
                c, "rollout", "r", values={"spooled_groups": 3.0, "spooled_bytes": 2.0**20, "spool_age_s": 9.0}
            ),
            "rollout server r cannot publish: 3 groups (1.0 MiB) wait for Redis, the oldest for 9 s",
        ),
        (lambda c: c.config_set("maxmemory", "1"), "Redis uses"),
    ],
)
def test_what_is_wrong_with_delivery_is_named_with_what_to_do(
    client: redis.Redis, look: Callable[[], RunSnapshot], harm: Callable[[redis.Redis], object], words: str
) -> None:
    report(client, "learner", "l", values=LEARNER | LAW | {"epoch": 7.0})
    client.set(KEYS.epoch, 7)
    assert problems(look(), max_lag=2) == []
    before = client.config_get("maxmemory")["maxmemory"]
    try:
        harm(client)
        found = problems(look(), max_lag=2)
    finally:
        client.config_set("maxmemory", before)
    assert any(words in p.what and p.todo for p in found), found


def test_waits_are_shares_of_the_time_between_two_looks(client: redis.Redis, look: Callable[[], RunSnapshot]) -> None:
    before = look()
    report(client, "learner", "l", uptime_s=12.0, values=LEARNER, waits={"data": 8.0, "compute": 3.0})
    assert waits_in_words(look(), before) == ["100%  the learner computes: training is the bottleneck"]


def test_a_restarted_process_is_counted_from_its_own_start(
    client: redis.Redis, look: Callable[[], RunSnapshot]
) -> None:
    before = look()
    report(client, "learner", "l", uptime_s=2.0, values=LEARNER, waits={"data": 1.0})
    assert waits_in_words(look(), before)[0].startswith(" 50%  the learner waits for trajectories")


def test_top_prints_one_frame_into_a_pipe(
    client: redis.Redis, redis_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(client)
    config = tmp_path / "by-hand.yaml"
    config.write_text(f"run: {{id: test, dir: {tmp_path}, redis_url: '{redis_url}'}}\n")
    assert top_command.run(argparse.Namespace(given=[], config=config, interval=1.0, once=True, json=False)) == 0
    out = capsys.readouterr().out
    assert "run test: training" in out and "\x1b" not in out


def test_a_rollout_server_that_finds_no_retriever_is_a_problem_with_its_reason(
    client: redis.Redis, look: Callable[[], RunSnapshot]
) -> None:
    assert not problems(look(), max_lag=2)
    report(client, "rollout", "rollout-1", text={"search_outage": "unreachable at http://h:1"})
    (problem,) = problems(look(), max_lag=2)
    assert "rollout-1 has no healthy retriever: unreachable at http://h:1" in problem.what and "start" in problem.todo


def test_a_wrong_address_of_the_retriever_is_called_wrong(client: redis.Redis, look: Callable[[], RunSnapshot]) -> None:
    report(client, "rollout", "rollout-1", text={"search_outage": "http_404 at http://h:1/x"})
    (problem,) = problems(look(), max_lag=2)
    assert "rollout-1" in problem.what and "http://h:1/x" in problem.what
    assert "rollout.search.urls" in problem.todo and "start the retriever" not in problem.todo


def test_what_redis_refuses_a_process_is_a_problem(client: redis.Redis, look: Callable[[], RunSnapshot]) -> None:
    report(
        client,
        "rollout",
        "rollout-1",
        text={"redis_refusal": "{test}:traj has unexpected content: run `DEL {test}:traj`"},
    )
    (problem,) = problems(look(), max_lag=2)
    assert "rollout rollout-1" in problem.what and "DEL {test}:traj" in problem.what


@pytest.mark.parametrize("name", ["engines", "processes", "target", "tokens", "events", "dlq"])
def test_a_key_of_another_type_is_named_with_the_way_out(
    client: redis.Redis, look: Callable[[], RunSnapshot], name: str
) -> None:
    key = getattr(KEYS, name)
    client.delete(key)
    client.lpush(key, "of another type")
    (problem,) = problems(look(), max_lag=2)
    assert key in problem.what and f"DEL {key}" in problem.todo


def test_values_that_are_none_and_ids_that_no_clock_makes_are_survived(
    client: redis.Redis, look: Callable[[], RunSnapshot]
) -> None:
    client.mset({KEYS.issued: "abc", KEYS.epoch: "9" * 5000})
    client.hset(KEYS.target, "state", b"\xff")
    client.zadd(KEYS.engines, {b"\xff": 2e9})
    for stream in (KEYS.events, KEYS.dlq):
        client.xadd(stream, {"kind": "x", "reason": "y"}, id=f"{2**64 - 1}-1")
    seen = look()
    assert not seen.error and seen.issued == 0
    assert "event         00:00:00" in render(seen, max_lag=2)


def test_the_command_to_go_on_with_shows_no_password() -> None:
    given = "run.redis_url=redis://default:geheim@10.0.0.1:6379/0"
    assert redacted_override(given) == "run.redis_url=redis://default:[secret]@10.0.0.1:6379/0"
    assert redacted_override("run.steps=7") == "run.steps=7"
