"""The OpenAPI 3.1 document of the rollout server, built from the models that validate the requests. Pure."""

from __future__ import annotations

from protocol.runtime.http.openapi import (
    EVENTS,
    JSON,
    OPEN,
    REF,
    REFUSALS,
    TEXT,
    Object,
    document,
    failures,
    operation,
    parameter,
    response,
    serve_document,
)
from rollout_server.api.episodes import EpisodesRequest

ERROR: Object = {"type": "object", "required": ["error"], "properties": {"error": {"type": "string"}}}
HEALTH: Object = {"type": "object", "required": ["status"], "properties": {"status": {"const": "ok"}}}
READY: Object = {
    "type": "object",
    "required": ["ready", "reasons"],
    "properties": {"ready": {"type": "boolean"}, "reasons": {"type": "array", "items": {"type": "string"}}},
}
STATUS: Object = {
    "type": "object",
    "required": ["run", "id", "stopping", "target", "done", "engines", "values", "waits"],
    "properties": {
        "run": {"type": "string"},
        "id": {"type": "string"},
        "stopping": {"type": "boolean"},
        "target": {"type": ["string", "null"]},
        "done": {"type": "boolean"},
        "engines": {"type": "array", "items": {"type": "object", "required": ["id", "url", "state", "version"]}},
        "values": {"type": "object", "additionalProperties": {"type": "number"}},
        "waits": {"type": "object", "additionalProperties": {"type": "number"}},
    },
}
EPISODES: Object = {
    "type": "object",
    "required": ["episodes", "em", "count", "failed", "versions", "searches_mean", "tokens_generated"],
    "properties": {
        "episodes": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["question_id", "index", "version", "status", "answer", "reward", "text"],
            },
        },
        "em": {"type": ["number", "null"]},
        "count": {"type": "integer", "minimum": 1},
        "failed": {"type": "integer", "minimum": 0},
        "versions": {"type": "object", "additionalProperties": {"type": "integer"}},
        "searches_mean": {"type": "number"},
        "tokens_generated": {"type": "integer", "minimum": 0},
    },
}
LIVE: Object = {
    "type": "object",
    "required": ["watchers", "groups"],
    "properties": {
        "watchers": {"type": "integer", "minimum": 0},
        "groups": {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["seq", "attempt", "question_id", "question", "seconds", "trajectories"],
                "properties": {
                    "trajectories": {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": [
                                *("index", "state", "status", "turns", "tokens", "searches", "last_query", "engine")
                            ],
                            "properties": {"state": {"enum": ["ended", "generating", "waiting", "acting"]}},
                        },
                    }
                },
            },
        },
    },
}


def describe() -> Object:
    """Return the whole document."""
    body = EpisodesRequest.model_json_schema(ref_template=REF)
    schemas = body.pop("$defs", {}) | {"EpisodesRequest": body}
    refusals = failures(REFUSALS, ERROR)
    finished = {JSON: {"schema": EPISODES}, EVENTS: {}}
    episodes = {
        "200": {"description": "finished episodes; server-sent events where `stream` was true", "content": finished},
        "400": response("what is wrong with the request", ERROR),
        "408": response("the body did not arrive in time", ERROR),
        "413": response("the body is too large", {"type": "string"}, TEXT),
        "503": response("the version cannot be pinned, or Redis does not answer", ERROR),
    }
    watched = {
        "200": response("events start, segment and end: see rollout_server/api/live.py", {"type": "string"}, EVENTS),
        "400": response("seq or index is no number", ERROR),
        "404": response("the trajectory is not in flight at this server", ERROR),
        "503": response("too many watchers", ERROR),
    }
    ready = {"200": response("ready", READY), "503": response("not ready", READY)}

    def get(summary: str, answer: Object) -> Object:
        return {"get": operation({"200": answer} | refusals, summary=summary)}

    paths = {
        "/health": {
            "get": operation({"200": response("healthy", HEALTH)}, summary="The event loop runs.", security=OPEN)
        },
        "/ready": {"get": operation(ready, summary="Redis answers and an engine accepts requests.", security=OPEN)},
        "/status": get("Target, engines, counters.", response("state", STATUS)),
        "/metrics": get("Prometheus.", response("metrics", {"type": "string"}, TEXT)),
        "/openapi.json": get("This document.", response("OpenAPI", {"type": "object"})),
        "/v1/live": get("Groups in flight and their trajectories.", response("groups", LIVE)),
        "/v1/live/trajectory": {
            "get": operation(
                watched | refusals,
                summary="Server-sent events of one trajectory, to its end.",
                parameters=[parameter(name, "query", {"type": "integer"}) for name in ("seq", "index")],
            )
        },
        "/v1/episodes": {
            "post": operation(
                episodes | refusals,
                summary="Run episodes for questions.",
                body={"$ref": REF.format(model="EpisodesRequest")},
            )
        },
    }
    return document("Foray rollout server", paths, schemas=schemas)


openapi = serve_document(describe)
