"""What the retriever's HTTP side is, as OpenAPI 3.1: made from the models that check the requests. Pure.

A test holds the paths and methods against the application's routes, and requests that are drawn from this description
are sent to a running service.
"""

from __future__ import annotations

from typing import Any

from aiohttp import web
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from protocol.search import Passage, SearchRequest
from retriever.api.flashrag import ManyQueries, OneQuery
from retriever.api.openai import EmbeddingRequest

Object = dict[str, Any]
JSON, TEXT = "application/json", "text/plain"
REF = "#/components/schemas/{model}"
BODIES: dict[str, type[BaseModel]] = {
    "/retrieve": SearchRequest,
    "/search": OneQuery,
    "/batch_search": ManyQueries,
    "/v1/embeddings": EmbeddingRequest,
}

DOCUMENT: Object = {"$ref": REF.format(model="Passage")}
SCORED: Object = {
    "type": "object",
    "required": ["document", "score"],
    "properties": {"document": DOCUMENT, "score": {"type": "number"}},
}
RESULT: Object = {
    "type": "object",
    "required": ["result"],
    "properties": {
        "result": {"type": "array", "items": {"type": "array", "items": {"anyOf": [SCORED, DOCUMENT]}}},
        "errors": {"type": "array", "items": {"type": ["string", "null"]}},
    },
}
ARRAY: Object = {"type": "array"}
ERROR: Object = {"type": "object", "required": ["error"], "properties": {"error": {"type": ["string", "object"]}}}
EMBEDDINGS: Object = {
    "type": "object",
    "required": ["object", "data", "model", "usage"],
    "properties": {
        "object": {"const": "list"},
        "data": {"type": "array", "items": {"type": "object", "required": ["object", "index", "embedding"]}},
        "model": {"type": "string"},
        "usage": {"type": "object"},
    },
}
MODELS: Object = {"type": "object", "required": ["object", "data"]}
ANSWERS: dict[str, Object] = {
    "/retrieve": RESULT,
    "/search": ARRAY,
    "/batch_search": ARRAY,
    "/v1/embeddings": EMBEDDINGS,
}
SUMMARIES = {
    "/retrieve": "Search-R1's dialect: passages for queries.",
    "/search": "FlashRAG's dialect: documents for one query.",
    "/batch_search": "FlashRAG's dialect: documents for queries.",
    "/v1/embeddings": "OpenAI's dialect: vectors of texts, by the index's encoder.",
}
FAILURES = {
    "400": "what is wrong with the request",
    "401": "no token",
    "403": "a token of another role; without tokens a page of another origin, or no loopback name",
    "404": "there is no such thing here",
    "408": "the body did not come in time",
    "413": "the body is too large",
    "415": "the body is compressed, or without tokens no JSON",
    "429": "too much at once; see Retry-After",
    "500": "the index failed",
    "502": "a provider failed",
    "503": "not open, or stopping",
}


def describe() -> Object:
    """The whole document."""
    models = [(model, "validation") for model in (*BODIES.values(), Passage)]
    _, definitions = models_json_schema(models, ref_template=REF)  # type: ignore[arg-type]
    failures = {status: _answer(why, ERROR) for status, why in FAILURES.items()}
    passage = {"200": _answer("the document", DOCUMENT)} | failures
    state = {"type": "object"}
    text = _answer("metrics", {"type": "string"}, TEXT)
    paths: Object = {path: {"post": _searching(path, failures)} for path in BODIES}
    paths |= {
        "/v1/models": _get("The encoder's name, in OpenAI's form.", {"200": _answer("one model", MODELS)} | failures),
        "/passages": _get("A document by `?id=`.", passage, _parameter("id", "query")),
        "/passages/{id}": _get("A document by its id.", passage, _parameter("id", "path")),
        "/info": _get("What is served, and its limits.", {"200": _answer("state", state)} | failures),
        "/health": _get("The process lives.", {"200": _answer("well", state)}),
        "/ready": _get("Searches are answered.", {"200": _answer("ready", state), "503": _answer("not open", ERROR)}),
        "/metrics": _get("Prometheus.", {"200": text} | failures),
        "/openapi.json": _get("This document.", {"200": _answer("OpenAPI", state)} | failures),
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Foray retriever", "version": "1"},
        "paths": paths,
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


async def openapi(_: web.Request) -> web.Response:
    """`GET /openapi.json`."""
    return web.json_response(describe())


def _searching(path: str, failures: Object) -> Object:
    schema = {"$ref": REF.format(model=BODIES[path].__name__)}
    return {
        "summary": SUMMARIES[path],
        "requestBody": {"required": True, "content": {JSON: {"schema": schema}}},
        "responses": {"200": _answer("found", ANSWERS[path])} | failures,
        "security": [{}, {"token": []}],
    }


def _get(summary: str, responses: Object, *parameters: Object) -> Object:
    found: Object = {"summary": summary, "responses": responses, "security": [{}, {"token": []}]}
    return {"get": found | ({"parameters": list(parameters)} if parameters else {})}


def _parameter(name: str, place: str) -> Object:
    return {"name": name, "in": place, "required": True, "schema": {"type": "string", "minLength": 1}}


def _answer(description: str, schema: Object, kind: str = JSON) -> Object:
    return {"description": description, "content": {kind: {"schema": schema}}}
