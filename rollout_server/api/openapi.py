"""What the rollout server's HTTP side is, as OpenAPI 3.1: made from the models that check the requests. Pure.

A test holds the paths and methods against the application's routes, and requests that are drawn from this description
are sent to a running server.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rollout_server.api.episodes import EpisodesRequest

Object = dict[str, Any]
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"

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


def describe() -> Object:
    """The whole document."""
    body = EpisodesRequest.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas = body.pop("$defs", {}) | {"EpisodesRequest": body}
    asked = {"required": True, "content": {JSON: {"schema": {"$ref": "#/components/schemas/EpisodesRequest"}}}}
    refusals = {
        "401": _answer("no token", ERROR),
        "403": _answer("a token of another role; without tokens a page of another origin, or no loopback name", ERROR),
        "415": _answer("the body is compressed, or without tokens no JSON", ERROR),
    }
    finished = {JSON: {"schema": EPISODES}, EVENTS: {}}
    episodes = {
        "200": {"description": "finished episodes; server-sent events where `stream` was true", "content": finished},
        "400": _answer("what is wrong with the body", ERROR),
        "408": _answer("the body did not come in time", ERROR),
        "413": _answer("the body is too large", {"type": "string"}, TEXT),
        "503": _answer("the version cannot be pinned, or Redis does not answer", ERROR),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foray rollout server", "version": "1"},
        "paths": {
            "/health": {"get": _operation("The event loop turns.", {"200": _answer("well", HEALTH)}, open_=True)},
            "/ready": {
                "get": _operation(
                    "Redis answers and an engine takes requests.",
                    {"200": _answer("ready", READY), "503": _answer("not ready", READY)},
                    open_=True,
                )
            },
            "/status": {"get": _operation("Target, engines, counters.", {"200": _answer("state", STATUS)} | refusals)},
            "/metrics": {
                "get": _operation("Prometheus.", {"200": _answer("metrics", {"type": "string"}, TEXT)} | refusals)
            },
            "/openapi.json": {
                "get": _operation("This document.", {"200": _answer("OpenAPI", {"type": "object"})} | refusals)
            },
            "/v1/episodes": {
                "post": _operation("Questions in, finished episodes out.", episodes | refusals) | {"requestBody": asked}
            },
        },
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
    }


async def openapi(_: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    return web.json_response(describe())


def _operation(summary: str, responses: Object, *, open_: bool = False) -> Object:
    return {"summary": summary, "responses": responses, "security": [] if open_ else [{}, {"token": []}]}


def _answer(description: str, schema: Object, kind: str = JSON) -> Object:
    return {"description": description, "content": {kind: {"schema": schema}}}
