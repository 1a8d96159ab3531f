"""The Grafana dashboard and the scrape configuration of Prometheus, made from one table. Pure.

In expressions `{R` begins the selector of the chosen runs, `{R?` also takes series without a run (a retriever may serve
several), and `[I]` is Grafana's interval for rates. tests/deploy/test_grafana.py checks every name against the metrics
in docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RULES = Path(__file__).parent / "templates" / "prometheus_rules.yml"
RUN, RUN_OR_NONE, INTERVAL = '{run=~"$run"', '{run=~"$run|"', "[$__rate_interval]"
COLUMNS, HEIGHT, STAT_HEIGHT = 24, 8, 4
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


@dataclass(frozen=True)
class Panel:
    """One panel. `series`: legend -> expression. `unit` is one of Grafana's; `stacked` draws shares of a whole."""

    title: str
    series: Mapping[str, str]
    unit: str = "short"
    help: str = ""
    stacked: bool = False
    stat: bool = False


def _stat(title: str, expression: str, unit: str = "none", help: str = "") -> Panel:
    return Panel(title, {"{{run}}": expression}, unit, help, stat=True)


def _quantiles(title: str, histogram: str, by: str, unit: str, help: str = "") -> Panel:
    series = {
        f"p{q[2:]:0<2} {{{{run}}}}": f"histogram_quantile({q}, sum by (le, run) (rate({histogram}_bucket{by}[I])))"
        for q in ("0.5", "0.95")
    }
    return Panel(title, series, unit, help)


def _each(*names: str) -> Mapping[str, str]:
    return {f"{name} {{{{run}}}}": f"foray_learner_{name}{{R}}" for name in names}


ROWS: Mapping[str, tuple[Panel, ...]] = {
    "Overview": (
        _stat("Step", "foray_learner_step{R}"),
        _stat(
            "Time left",
            "clamp_min(foray_learner_steps{R} - foray_learner_step{R}, 0)"
            " * avg_over_time(foray_learner_step_seconds{R}[15m])",
            "s",
            "Remaining steps, each as long as the steps of the last 15 minutes.",
        ),
        _stat(
            "Alerts",
            'sum(ALERTS{R?,alertname=~"Foray.*",alertstate="firing"}) or vector(0)',
            help="Firing alerts of rules.yml.",
        ),
        _stat("Consistent", "foray_learner_accounting_consistent{R}", help="1: every seq and token is accounted for."),
        _stat("Engines", "max by (run) (foray_rollout_engines_routable{R})", help="Engines that take requests."),
        _stat("Retrievers", "min by (run) (foray_rollout_retrievers_healthy{R})", help="Healthy retrievers."),
        Panel("Reward", {
            "trained {{run}}": "foray_learner_reward_mean{R}",
            "generated {{run}}": "avg by (run) (foray_rollout_reward_mean{R})",
        }),
        Panel("Parts of the reward", {"{{part}} {{run}}": "foray_learner_reward_part_mean{R}"}),
        Panel("Validation", {
            "{{suite}} {{metric}} {{run}}": 'foray_learner_validation{R,metric=~"em|f1|reward"}',
        }, help="Means of the last validation during training (learner.eval)."),
    ),
    "Who waits for whom": (
        Panel(
            "Learner: seconds per second",
            {"{{cause}}": "sum by (cause) (rate(foray_learner_seconds_total{R}[I]))"},
            "percentunit",
            "data: waits for trajectories, so generation is the bottleneck. compute: training is the bottleneck.",
            stacked=True,
        ),
        Panel("Rollout servers: share of time with a wait", {
            "{{cause}}": "avg by (cause) (rate(foray_rollout_wait_seconds_total{R}[I]))",
        }, "percentunit", "credit: waits for tasks, so the learner is the bottleneck. Causes can overlap."),
        Panel("Seconds of a step", _each("step_seconds"), "s"),
    ),
    "Throughput": (
        Panel("Tokens per second", {
            "generated {{run}}": "sum by (run) (rate(foray_rollout_tokens_generated_total{R}[I]))",
            "trained {{run}}": "foray_learner_tokens_trained_per_second{R}",
        }),
        Panel("Groups per second", {
            "published {{run}}": "sum by (run) (rate(foray_rollout_groups_published_total{R}[I]))",
            "trained {{run}}": "foray_learner_groups_trained_per_second{R}",
        }),
        Panel("Work in flight", {
            "groups in progress {{run}}": "sum by (run) (foray_rollout_groups_in_flight{R})",
            "trajectories {{run}}": "sum by (run) (foray_rollout_trajectories_in_flight{R})",
            "groups that wait for training {{run}}": "foray_learner_held{R}",
        }),
        _quantiles("Age of a group when it is trained", "foray_learner_group_queue_age_seconds", "{R}", "s"),
        _quantiles("Age of a task when it is leased", "foray_rollout_task_queue_age_seconds", "{R}", "s"),
        Panel("Publication of weights", {"{{phase}}": "foray_learner_publish_seconds{R}"}, "s", stacked=True),
    ),
    "Staleness": (
        Panel("Lag of trained tokens", _each("lag_mean", "lag_max"), help="Steps between sampling and training."),
        Panel("Tokens by lag", {
            "up to {{le}} steps": "sum by (le) (rate(foray_learner_token_lag_steps_bucket{R}[I]))",
        }, help="Tokens per second whose lag is at most this."),
        Panel("Tokens without a gradient", _each("tokens_stale", "tokens_orphan", "tokens_invalid"), help="Per step."),
        Panel("Ratios", _each("ratio_mean", "ratio_max", "ess")),
        Panel("Clipped and rejected tokens", _each("clip_fraction", "rejected"), "percentunit"),
        Panel("Learner and engines", _each("logprob_gap", "kl_behaviour"), help="Difference of their log-probs."),
    ),
    "Learning": (
        Panel("Loss", _each("loss")),
        Panel("Entropy", _each("entropy")),
        Panel("Gradient", _each("grad_norm")),
        Panel("Log-probs by advantage", _each("logprob_right", "logprob_wrong"), help="Good ones should not fall."),
        Panel("Change of good log-probs over a step", _each("logprob_change"), help="Nats per token, of a sample."),
        Panel("Good turns whose log-prob fell", _each("fell_turns", "fell_trajectories"), "percentunit"),
        Panel("Divergence from the reference", _each("kl_reference")),
        Panel("Trajectories without advantage", _each("zero_advantage_share"), "percentunit"),
        Panel("Learning rate", _each("lr")),
    ),
    "Trajectories": (
        Panel("Trajectories per second by status", {
            "{{status}}": "sum by (status) (rate(foray_rollout_trajectories_ended_total{R}[I]))",
        }, stacked=True),
        Panel("Tokens of a response", _each("response_length_mean", "response_length_max")),
        Panel("Turns and searches", _each("turns_mean", "searches_mean", "invalid_actions_mean")),
    ),
    "Search": (
        Panel("Searches per second", {
            "searches {{run}}": "sum by (run) (rate(foray_rollout_searches_total{R}[I]))",
            "failed: {{kind}}": "sum by (kind) (rate(foray_rollout_search_errors_total{R}[I]))",
            "failed attempt: {{kind}}": "sum by (kind) (rate(foray_rollout_search_faults_total{R}[I]))",
        }),
        _quantiles("Duration of a search", "foray_rollout_search_seconds", "{R}", "s", "Retries included."),
        Panel("Queue and limit of the client", {
            "queued {{run}}": "sum by (run) (foray_rollout_searches_queued{R})",
            "in flight {{run}}": "sum by (run) (foray_rollout_searches_in_flight{R})",
            "limit {{run}}": "sum by (run) (foray_rollout_search_window{R})",
        }),
        Panel("Retrievers: queries per second", {
            "queries": "sum(rate(foray_retriever_queries_total{R?}[I]))",
            "from the cache": "sum(rate(foray_retriever_cache_hits_total{R?}[I]))",
            "searched": "sum(rate(foray_retriever_searched_total{R?}[I]))",
            "requests refused": "sum(rate(foray_retriever_rejected_total{R?}[I]))",
        }),
        _quantiles("Retrievers: duration of a request", "foray_retriever_request_seconds", "{R?}", "s"),
        Panel("Retrievers: queue", {"{{instance}}": "sum by (instance) (foray_retriever_queue{R?})"}),
    ),
    "Engines": (
        Panel("Failed requests and failovers per second", {
            "{{cause}}": "sum by (cause) (rate(foray_rollout_engine_errors_total{R}[I]))",
            "failovers {{run}}": "sum by (run) (rate(foray_rollout_failovers_total{R}[I]))",
        }),
        Panel("Turns", {
            "waiting {{run}}": "sum by (run) (foray_rollout_turns_waiting{R})",
            "at engines {{run}}": "sum by (run) (foray_rollout_requests_in_flight{R})",
        }),
        Panel("Tokens per second by engine", {"{{instance}}": "sglang:gen_throughput{R?}"}),
        Panel("Requests by engine", {
            "running {{instance}}": "sglang:num_running_reqs{R?}",
            "queued {{instance}}": "sglang:num_queue_reqs{R?}",
        }),
        Panel("KV cache in use", {"{{instance}}": "sglang:token_usage{R?}"}, "percentunit"),
        Panel("Prompt tokens found in the cache", {"{{instance}}": "sglang:cache_hit_rate{R?}"}, "percentunit"),
    ),
    "Delivery": (
        Panel("Seqs by outcome", _each("trained_total", "filtered_total", "stale", "dead")),
        Panel("Tokens per second by outcome", {
            "{{outcome}}": "sum by (outcome) (rate(foray_learner_tokens_by_outcome_total{R}[I]))",
        }, stacked=True),
        Panel("Repeats and losses", _each("dead_letters_total", "duplicates_total", "reissued_total")),
        Panel("Steps since the last checkpoint", {
            "{{run}}": "foray_learner_step{R} - foray_learner_checkpoint_step{R}",
        }),
        Panel("Groups that wait for Redis", {"{{run}}": "sum by (run) (foray_rollout_spooled_groups{R})"}),
        Panel("Delay of the event loop", {"{{instance}}": "foray_rollout_event_loop_lag_seconds{R}"}, "s"),
    ),
}  # fmt: skip


def expand_expression(expression: str) -> str:
    """Return the expression as Grafana reads it, without short forms."""
    return expression.replace("{R?", RUN_OR_NONE).replace("{R", RUN).replace("[I]", INTERVAL)


def dashboard() -> dict[str, Any]:
    """Return the dashboard for Grafana's import."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append({"type": "row", "title": title, "gridPos": place, "collapsed": False, "panels": []})
        top, left = top + 1, 0
        for panel in row:
            width, height = (COLUMNS // 6, STAT_HEIGHT) if panel.stat else (COLUMNS // 3, HEIGHT)
            panels.append(_panel(panel) | {"gridPos": {"x": left, "y": top, "w": width, "h": height}})
            left += width
            if left == COLUMNS:
                top, left = top + height, 0
    for number, drawn in enumerate(panels, start=1):
        drawn["id"] = number
    return {
        "title": "Foray",
        "uid": "foray",
        "tags": ["foray"],
        "schemaVersion": 39,
        "timezone": "browser",
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    query = 'label_values({__name__=~"foray_learner_step|foray_rollout_trajectories_total"}, run)'
    run = {"name": "run", "label": "run", "type": "query", "datasource": DATASOURCE, "refresh": 2, "sort": 2}
    source = {"name": "datasource", "label": "data source", "type": "datasource", "query": "prometheus"}
    return [source, run | {"query": {"query": query, "refId": "run"}, "multi": True, "includeAll": False}]


def _panel(panel: Panel) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": expand_expression(text), "legendFormat": legend, "datasource": DATASOURCE}
        for i, (legend, text) in enumerate(panel.series.items())
    ]
    lines: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 30 if panel.stacked else 0, "showPoints": "never"}
    if panel.stacked:
        lines["stacking"] = {"mode": "normal"}
    custom = {} if panel.stat else {"custom": lines}
    return {
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.help,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": {"unit": panel.unit} | custom, "overrides": []},
        "options": {} if panel.stat else {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
    }


def scrape_config(run: str, targets: Mapping[str, Sequence[str]], rules: str, token_file: str = "") -> dict[str, Any]:
    """Return the configuration of Prometheus for a run.

    Args:
        targets: URLs by kind of process: learner, rollout, retriever, engine.
        rules: File of the rules, relative to the configuration.
        token_file: File with the token of a viewer. "": the run has no tokens.
    """
    access = {"authorization": {"credentials_file": token_file}} if token_file else {}
    jobs: list[dict[str, Any]] = []
    for kind, urls in targets.items():
        schemes = {url.partition("://")[0] for url in urls}
        for scheme in sorted(schemes):
            hosts = [url.partition("://")[2].rstrip("/") for url in urls if url.startswith(f"{scheme}://")]
            # retrievers and engines do not know which run they serve
            labels = {"labels": {"run": run}} if kind in ("retriever", "engine") else {}
            name = f"foray-{kind}" if scheme == "http" else f"foray-{kind}-{scheme}"
            place = {"static_configs": [{"targets": hosts, **labels}]}
            jobs.append({"job_name": name, "scheme": scheme, **access, **place})
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "15s"},
        "rule_files": [rules],
        "scrape_configs": jobs,
    }
