"""The routes of the dashboard and their OpenAPI 3.1 document. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from protocol.runtime.http import openapi as made
from protocol.runtime.http.openapi import ARRAY, EVENTS, JSON, OBJECT, STRING, WHOLE, Object, parameter, record

ERROR = record(error=STRING)


class DashboardRoute(NamedTuple):
    """One route: what it returns or does, the media type, the parameters of its query, its method."""

    summary: str
    kind: str = JSON
    query: Sequence[str] = ()
    method: str = "get"
    """A `post` needs the role operator."""
    body: Object | None = None


_FILTERS = (
    *("status", "source", "reward_min", "reward_max", "step_min", "step_max", "version", "text", "signal", "seq"),
    *("order", "limit", "offset"),
)
_QUESTION = record(server=WHOLE, model=STRING, messages=ARRAY, optional={"search": {"type": "boolean"}})
ROUTES: Mapping[str, DashboardRoute] = {
    "/health": DashboardRoute("The event loop runs."),
    "/ready": DashboardRoute("The same."),
    "/openapi.json": DashboardRoute("This document."),
    "/events": DashboardRoute("Server-sent events: hello, step, state, version, engines, problems, index.", EVENTS),
    "/api/overview": DashboardRoute("The run: state, problems, engines, processes, accounting, newest step."),
    "/api/diagnosis": DashboardRoute("What `foray diagnose` finds in the run, and the trajectories that show it."),
    "/api/steps": DashboardRoute("Columns of metrics.jsonl, at most 1500 points.", query=("names",)),
    "/api/staleness": DashboardRoute("Lag of tokens and groups, in all and over the steps."),
    "/api/facets": DashboardRoute("Statuses, sources and ranges of the trajectories."),
    "/api/trajectories": DashboardRoute("A page of the table of trajectories.", query=_FILTERS),
    "/api/groups/{seq}": DashboardRoute("A group, its trajectories and its way to training.", query=("epoch",)),
    "/api/groups/{seq}/{place}/tokens": DashboardRoute("The tokens of one trajectory.", query=("epoch",)),
    "/api/letters": DashboardRoute("The newest dead letters, and failed seqs."),
    "/api/evaluations": DashboardRoute("Validations, and results of `foray eval`."),
    "/api/logs": DashboardRoute("The logs, and the end of one: its newest entry first.", query=("name",)),
    "/api/settings": DashboardRoute("The settings of the run and their defaults."),
    "/api/retrievers": DashboardRoute("What each retriever that the launcher started says about itself."),
    "/api/live": DashboardRoute("Groups in flight at each rollout server that the launcher started."),
    "/api/live/{server}/{seq}/{place}": DashboardRoute(
        "Server-sent events of one trajectory while it is generated: start, segment, end; or gone.", EVENTS
    ),
    "/api/chat/models": DashboardRoute("The models of each `foray serve` that --chat names."),
    "/api/chat": DashboardRoute(
        "An answer of one of them, as chunks of OpenAI's chat completions.",
        *(EVENTS, (), "post", _QUESTION),
    ),
    "/api/engines/{engine}/drain": DashboardRoute(
        "Ask an engine to take no more requests. It stays so until its node is restarted.", method="post"
    ),
    "/export/groups/{seq}": DashboardRoute("A group as one HTML file.", "text/html", ("epoch",)),
    "/export/groups/{seq}/{place}": DashboardRoute("A trajectory as one HTML file.", "text/html", ("epoch",)),
}


def describe() -> Object:
    """Return the whole document."""
    paths = {path: {route.method: _operation(path, route)} for path, route in ROUTES.items()}
    return made.document("Foray dashboard", paths)


def _operation(path: str, route: DashboardRoute) -> Object:
    answers = {"200": made.response("the answer", OBJECT if route.kind == JSON else STRING, route.kind)}
    if path in ("/health", "/ready"):
        return made.operation(answers, summary=route.summary, security=made.OPEN)
    wrong = {"400": "a parameter is not valid, or nothing was found", "503": "a file of the run cannot be read"}
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    parameters = [parameter(name, "path", STRING if name == "engine" else WHOLE) for name in named]
    parameters += [parameter(name, "query") | {"required": name == "names"} for name in route.query]
    refused = made.failures({**made.REFUSALS, **wrong}, ERROR)
    return made.operation(answers | refused, summary=route.summary, body=route.body, parameters=parameters)
