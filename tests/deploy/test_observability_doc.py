"""docs/metrics.md matches the metrics tables, and every row follows the conventions of Prometheus."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import Metric as Family
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.pages.metrics import document
from learner.observability.metric_table import LEARNER, WAITS
from learner.observability.metrics_server import metrics_page as learner_page
from protocol.messages import MetricsSnapshot
from protocol.runtime.metrics import Histogram, Table, prometheus_name
from retriever.metrics import PROVIDER, Metrics
from rollout_server.cpu_engine.server.admin import ENGINE
from rollout_server.metric_tables import TABLES
from rollout_server.metrics import Stats, page_of
from tests.support.metrics_page import check_family, check_page

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_page_is_made_from_the_tables() -> None:
    assert PAGE.read_text() == document(), "make reference"


@pytest.mark.parametrize(
    ("prefix", "table"),
    [pytest.param(*row, id=row[0]) for row in (("learner_", LEARNER), ("sglang:", ENGINE), *TABLES.items())],
)
def test_every_row_is_a_sentence_with_a_type_and_a_unit(prefix: str, table: Table) -> None:
    for key, row in table.items():
        check_family(Family(prometheus_name(prefix, key, row), row.help, row.kind))


def test_names_do_not_collide() -> None:
    for table in (LEARNER, ENGINE, *TABLES.values()):
        names = [prometheus_name("", key, row) for key, row in table.items()]
        names.append(prometheus_name("", "", WAITS))
        assert len(names) == len(set(names)), sorted(n for n in names if names.count(n) > 1)


def test_a_learners_page_of_everything() -> None:
    values = {key.replace("*", "one"): 1.0 for key, row in LEARNER.items() if row.kind != "histogram"}
    now = MetricsSnapshot(process="learner", id="0", values=values, waits={"data": 2.0})
    lags = Histogram(LEARNER["token_lag_steps"].buckets)
    lags.observe(1, 7)
    lags.observe(3, 2)
    lags.observe(99)
    families = check_page(learner_page("r", lambda: now, lambda: {"token_lag_steps": lags}).text().decode())
    assert {s.labels["run"] for f in families.values() for s in f.samples} == {"r"}
    assert families["foray_learner_tokens_trained"].type == "counter"
    assert families["foray_learner_step"].type == families["foray_learner_loss"].type == "gauge"
    assert families["foray_learner_reward_part_mean"].samples[0].labels == {"part": "one", "run": "r"}
    buckets = {s.labels["le"]: s.value for s in families["foray_learner_token_lag_steps"].samples if "le" in s.labels}
    assert (buckets["0.0"], buckets["1.0"], buckets["2.0"], buckets["3.0"], buckets["+Inf"]) == (0, 7, 7, 9, 10)
    assert [s.value for s in families["foray_learner_token_lag_steps"].samples if s.name.endswith("_sum")] == [
        7 + 6 + 99
    ]


def test_rewards_below_zero_have_a_sum_and_a_count() -> None:
    server = Stats("rollout", "s")
    for reward in (-0.75, 1.0, 1.0):
        server.distribute("reward", reward)
    found = check_page(page_of(server, "r").text().decode())["foray_rollout_reward"].samples
    values = {s.name.removeprefix("foray_rollout_reward_"): s.value for s in found if "le" not in s.labels}
    assert values == {"sum": 1.25, "count": 3.0}


def test_names_that_no_table_has_stay_apart() -> None:
    now = MetricsSnapshot(process="learner", id="0", values={"my-loss": 1.0, "my_loss": 2.0, "my/loss": 3.0})
    page = learner_page("r", lambda: now).text().decode()
    assert page.count("# TYPE foray_learner_extension gauge") == 1 and "my_loss " not in page
    (family,) = (f for f in text_string_to_metric_families(page) if f.name == "foray_learner_extension")
    assert {s.labels["name"]: s.value for s in family.samples} == now.values


def test_a_nodes_page_and_a_retrievers_are_sound() -> None:
    node = Stats("node", "n")
    node.counts["updates"] = 2
    node.gauges["redis_refused"] = lambda: 3
    shown = check_page(page_of(node, "r").text().decode())
    assert shown["foray_node_updates"].samples[0].value == 2
    refused = shown["foray_node_redis_refused"]
    assert (refused.type, refused.samples[0].value) == ("counter", 3)
    metrics = Metrics()
    metrics.add_provider("web", lambda: dict.fromkeys(PROVIDER, 1.0))
    metrics.request("/search", 200)
    families = check_page(metrics.render().decode())
    assert not [name for name in families if name.endswith("_created")], "each would double its series"
    assert families["foray_retriever_requests"].samples[0].labels == {"route": "/search", "status": "200"}
