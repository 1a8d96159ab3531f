"""The OpenAPI 3.1 document of the rollout server, built from the models that validate the requests. Pure."""

from __future__ import annotations

from protocol.runtime.http import openapi as made
from protocol.runtime.http.openapi import EVENTS, OBJECT, REF, STRING, TEXT, WHOLE, Object, array, record, response
from rollout_server.api.episodes import EpisodesRequest

NUMBER, FLAG = {"type": "number"}, {"type": "boolean"}
ERROR = record(error=STRING)
HEALTH = record(status={"const": "ok"})
READY = record(ready=FLAG, reasons=array(STRING))
STATUS = record(
    run=STRING,
    id=STRING,
    stopping=FLAG,
    target={"type": ["string", "null"]},
    done=FLAG,
    engines=array(record("id", "url", "state", "version")),
    values=made.mapping(NUMBER),
    waits=made.mapping(NUMBER),
)
EPISODES = record(
    episodes=array(record("question_id", "index", "version", "status", "answer", "reward", "text")),
    em={"type": ["number", "null"]},
    count={"type": "integer", "minimum": 1},
    failed=WHOLE,
    versions=made.mapping({"type": "integer"}),
    searches_mean=NUMBER,
    tokens_generated=WHOLE,
)
TRAJECTORY = record(
    *("index", "status", "turns", "tokens", "searches", "last_query", "engine"),
    state={"enum": ["ended", "generating", "waiting", "acting"]},
)
LIVE = record(
    watchers=WHOLE,
    groups=array(record("seq", "attempt", "question_id", "question", "seconds", trajectories=array(TRAJECTORY))),
)


def describe() -> Object:
    """Return the whole document."""
    body = EpisodesRequest.model_json_schema(ref_template=REF)
    schemas = body.pop("$defs", {}) | {"EpisodesRequest": body}
    refusals = made.failures(made.REFUSALS, ERROR)
    finished = {made.JSON: {"schema": EPISODES}, EVENTS: {}}
    episodes = {
        "200": {"description": "finished episodes; server-sent events where `stream` was true", "content": finished},
        "400": response("what is wrong with the request", ERROR),
        "408": response("the body did not arrive in time", ERROR),
        "413": response("the body is too large", STRING, TEXT),
        "503": response("the version cannot be pinned, or Redis does not answer", ERROR),
    }
    watched = {
        "200": response("events start, segment and end: see rollout_server/api/live.py", STRING, EVENTS),
        "400": response("seq or index is no number", ERROR),
        "404": response("the trajectory is not in flight at this server", ERROR),
        "503": response("too many watchers", ERROR),
    }
    ready = {"200": response("ready", READY), "503": response("not ready", READY)}

    def get(summary: str, answers: Object, *parameters: Object) -> Object:
        return {"get": made.operation(answers | refusals, summary=summary, parameters=parameters)}

    numbers = [made.parameter(name, "query", {"type": "integer"}) for name in ("seq", "index")]
    asked = made.operation(
        episodes | refusals, summary="Run episodes for questions.", body={"$ref": REF.format(model="EpisodesRequest")}
    )
    paths = {
        "/health": made.open_get("The event loop runs.", {"200": response("healthy", HEALTH)}),
        "/ready": made.open_get("Redis answers and an engine accepts requests.", ready),
        "/status": get("Target, engines, counters.", {"200": response("state", STATUS)}),
        "/metrics": get("Prometheus.", {"200": response("metrics", STRING, TEXT)}),
        "/openapi.json": get("This document.", {"200": response("OpenAPI", OBJECT)}),
        "/v1/live": get("Groups in flight and their trajectories.", {"200": response("groups", LIVE)}),
        "/v1/live/trajectory": get("Server-sent events of one trajectory, to its end.", watched, *numbers),
        "/v1/episodes": {"post": asked},
    }
    return made.document("Foray rollout server", paths, schemas=schemas)


openapi = made.serve_document(describe)
