"""Rollouts continue whatever a retriever does: the real loop and the real client against a misbehaving server.

Each way to fail is counted under its own name, and each trajectory and group ends as the setting says.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.messages import Owner, Question, Sampling, Status, Task, TrajectoryGroup
from rollout_server.engine.base import GenerateRequest
from rollout_server.environment.environment import Environment
from rollout_server.instrumentation import InstrumentedSearch
from rollout_server.metrics import Stats, prometheus_text
from rollout_server.rollout.group import GroupRejected, run_group
from rollout_server.search.client import HttpSearch, HttpSearchSettings
from tests.support.environments import make_environment
from tests.support.fake_engine import FakeEngine, Play
from tests.support.fake_search import HTML, FakeRetriever, Fault

QUESTION = Question(id="q", text="a b ?", answers=("c",))
PATIENT = {"deadline_s": 60.0, "attempt_s": 30.0, "probe_s": 10.0, "outage_wait_s": 30.0}
"""The number of attempts ends a query, no clock: a slow machine must not make a time-out of another failure."""
SHORT = PATIENT | {"deadline_s": 1.6, "attempt_s": 0.8}
"""For a retriever that never answers."""

FAULTS: dict[str, Fault] = {
    "http_500": Fault(500, "Internal Server Error"),
    "http_404": Fault(404),
    "http_400": Fault(400),
    "not_json": HTML,
    "bad_shape": Fault(body={"result": [[{"document": {"id": "p"}, "score": 1.0}]]}),
    "wrong_count": Fault(body={"result": [[], [], []]}),
    "too_large": Fault(body=b"x" * (10 << 20)),
    "failed_index": Fault(body={"result": [[]], "errors": ["index"]}),
    "timeout": Fault(hang=True),
    "overloaded": Fault(429, headers={"Retry-After": "60"}),
}

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.fixture
async def retriever() -> AsyncIterator[FakeRetriever]:
    async with FakeRetriever() as server:
        server.contents = lambda query, i: "t\nd e f"
        yield server


def member(environment: Environment, query: str) -> Callable[[int], Play]:
    """A policy that searches for `query` and then answers c."""
    return lambda turn: Play(
        environment.tokenizer.encode_trusted("<answer> c </answer>" if turn else f"<search> {query} </search>")
    )


async def roll(
    environment: Environment, retriever: FakeRetriever, stats: Stats, queries: str, limits: dict[str, float] = PATIENT
) -> TrajectoryGroup | GroupRejected:
    """A group whose members search for one of `queries` each."""
    members: dict[str, Callable[[int], Play]] = {}

    def script(request: GenerateRequest, turn: int) -> Play:
        members.setdefault(request.session, member(environment, queries[len(members) % len(queries)]))
        return members[request.session](turn)

    search = HttpSearch(HttpSearchSettings(urls=(retriever.url,), **limits))  # type: ignore[arg-type]
    task = Task(seq=1, question=QUESTION, group_size=len(queries), sampling=Sampling())
    try:
        measured = InstrumentedSearch(search, stats)
        return await run_group(environment, task, FakeEngine(script), measured, run="r", producer="p")
    finally:
        await search.close()


@pytest.mark.parametrize("setting", ["observe", "mask", "drop"])
@pytest.mark.parametrize("cause", FAULTS)
@pytest.mark.fault(36, 37)
async def test_a_query_that_fails_is_counted_by_its_name_and_ends_as_the_setting_says(
    tmp_path: Path, retriever: FakeRetriever, cause: str, setting: str
) -> None:
    retriever.script = lambda query: FAULTS[cause] if query == "a" else None
    environment, stats = make_environment(tmp_path, on_search_error=setting), Stats("rollout", "r")
    group = await roll(environment, retriever, stats, "bbab", SHORT if cause == "timeout" else PATIENT)
    named = {name: n for name, n in stats.counts.items() if name.startswith("search_errors_") and n}
    assert named == {f"search_errors_{cause}": 1}
    assert stats.counts["searches"] == 4 and stats.counts["search_outcome_found"] == 3
    assert stats.counts[f"search_faults_{cause}"] >= 1
    if setting == "drop":
        assert isinstance(group, GroupRejected) and group.reason == f"search_{cause}"
        return
    assert isinstance(group, TrajectoryGroup)
    failed = group.trajectories[2]
    (event,) = (s for s in failed.segments if s.owner is Owner.ENVIRONMENT)
    assert (event.query, event.error, event.passage_ids) == ("a", cause, ())
    if setting == "observe":
        assert failed.status is Status.ANSWERED and failed.reward == 1.0
        assert event.ids.tolist() == environment.observation((), 500, failed=True) and len(event.ids) > 2
    else:
        assert (failed.status, failed.cause, len(event.ids)) == (Status.FAILED, f"search_{cause}", 0)
        assert not failed.status.is_valid and failed.num_sampled == 3
    others = [t for t in group.trajectories if t is not failed]
    assert all(t.status is Status.ANSWERED and t.reward == 1.0 for t in others)


@pytest.mark.parametrize("way", ["killed", *FAULTS])
@pytest.mark.fault(36)
async def test_a_retriever_that_fails_every_query_is_unavailable_in_the_end_and_every_group_ends(
    tmp_path: Path, retriever: FakeRetriever, way: str
) -> None:
    environment, stats = make_environment(tmp_path), Stats("rollout", "r")
    retriever.script = lambda query: FAULTS.get(way)
    retriever.ready = way != "timeout"
    if way == "killed":
        await retriever.stop()
    limits = (SHORT if way == "timeout" else PATIENT) | {"probe_s": 0.3, "outage_wait_s": 0.3}
    group = await roll(environment, retriever, stats, "abcdefgh", limits)
    assert isinstance(group, TrajectoryGroup)
    assert all(t.status is Status.ANSWERED and t.searches == 1 for t in group.trajectories)
    errors = {s.error for t in group.trajectories for s in t.segments if s.owner is Owner.ENVIRONMENT}
    assert errors <= {"unavailable", way}, "never an empty result"
    assert stats.counts["search_errors"] == 8
    assert stats.counts[f"search_faults_{'unreachable' if way == 'killed' else way}"] > 0
    assert all(s.error for t in group.trajectories for s in t.segments if s.query)


async def test_finding_nothing_is_no_failure_and_is_counted_apart(tmp_path: Path, retriever: FakeRetriever) -> None:
    retriever.hits = 0
    environment, stats = make_environment(tmp_path), Stats("rollout", "r")
    group = await roll(environment, retriever, stats, "ab")
    assert isinstance(group, TrajectoryGroup)
    texts = {environment.tokenizer.decode(t.segments[2].ids.tolist()) for t in group.trajectories}
    assert texts == {"<information> nothing was found . </information>"}
    assert (stats.counts["search_outcome_nothing"], stats.counts["search_errors"]) == (2, 0)


async def test_prometheus_shows_causes_outcomes_durations_and_the_state(
    tmp_path: Path, retriever: FakeRetriever
) -> None:
    stats = Stats("rollout", "r")
    retriever.script = lambda query: HTML if query == "a" else None
    await roll(make_environment(tmp_path), retriever, stats, "bac")
    families = {f.name: f for f in text_string_to_metric_families(prometheus_text(stats, "run").decode())}
    errors = {s.labels["kind"]: s.value for s in families["foray_rollout_search_errors"].samples}
    assert errors["not_json"] == 1 and errors["timeout"] == errors["unavailable"] == 0 and sum(errors.values()) == 1
    outcomes = {s.labels["outcome"]: s.value for s in families["foray_rollout_search_outcomes"].samples}
    assert outcomes == {"found": 2, "nothing": 0}
    seconds = {s.name.rpartition("_")[2]: s for s in families["foray_rollout_search_seconds"].samples}
    assert seconds["count"].value == 3 and seconds["sum"].value > 0
    for gauge in ("search_window", "searches_in_flight", "retrievers_healthy", "search_breaker"):
        assert families[f"foray_rollout_{gauge}"].type == "gauge"
    assert stats.snapshot().text["search_outage"] == ""


async def test_failure_names_of_servers_do_not_flood_the_metrics(retriever: FakeRetriever) -> None:
    stats = Stats("rollout", "r")
    retriever.script = lambda query: (
        Fault(body={"result": [[]], "errors": [f"cause {query}"]}) if query.isdigit() else None
    )
    service = HttpSearch(HttpSearchSettings(urls=(retriever.url,), **PATIENT))  # type: ignore[arg-type]
    search = InstrumentedSearch(service, stats)
    for number in range(200):
        await search(str(number))
        await search("well")  # so that it is not taken for an outage
    await service.close()
    assert stats.counts["search_errors"] == 200 and stats.counts["search_errors_other"] > 100
    assert len(stats.counts) < 250
