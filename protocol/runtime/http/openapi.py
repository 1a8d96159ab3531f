"""Build the OpenAPI 3.1 document of a service from its routes. Pure.

For each service, a test compares paths and methods with the application's routes and sends requests generated from the
document to a running server.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

Object = dict[str, Any]
"""A JSON object, often a schema."""
JSON, TEXT, EVENTS = "application/json", "text/plain", "text/event-stream"
STRING: Object = {"type": "string"}
OBJECT: Object = {"type": "object"}
ARRAY: Object = {"type": "array"}
WHOLE: Object = {"type": "integer", "minimum": 0}
REF = "#/components/schemas/{model}"
"""`ref_template` of pydantic for models in the document."""

OPEN: Sequence[Object] = ()
"""Security of a route that needs no token."""
BY_TOKEN: Sequence[Object] = ({}, {"token": []})
"""Security of a route that needs a token if the service has one."""

REFUSALS: Mapping[str, str] = {
    "401": "no token",
    "403": "a token of another role; without tokens a page of another origin, or a name that is not loopback",
    "415": "the body is compressed, or without tokens not JSON",
}
"""Status -> reason, for every route behind `auth_middleware`."""


def document(
    title: str, paths: Object, *, schemas: Mapping[str, Any] | None = None, tokens: Sequence[str] = ("token",)
) -> Object:
    """Return the whole document.

    paths    path -> method -> `operation`
    schemas  name -> schema, the targets of `REF`
    tokens   names of the bearer tokens
    """
    security = {name: {"type": "http", "scheme": "bearer"} for name in tokens}
    components: Object = ({"schemas": dict(schemas)} if schemas else {}) | {"securitySchemes": security}
    return {"openapi": "3.1.0", "info": {"title": title, "version": "1"}, "paths": paths, "components": components}


def record(*names: str, optional: Mapping[str, Object] = MappingProxyType({}), **fields: Object) -> Object:
    """Return the schema of an object that must have `fields`, and `names` of any type."""
    properties = {**fields, **optional}
    return {**OBJECT, "required": [*names, *fields]} | ({"properties": properties} if properties else {})


def array(items: Object) -> Object:
    """Return the schema of an array of `items`."""
    return {**ARRAY, "items": items}


def mapping(values: Object) -> Object:
    """Return the schema of an object with any names."""
    return {**OBJECT, "additionalProperties": values}


def operation(
    responses: Object,
    *,
    summary: str = "",
    body: Object | None = None,
    parameters: Sequence[Object] = (),
    security: Sequence[Object] = BY_TOKEN,
) -> Object:
    """Return the description of one method of a path.

    responses  status -> `response`
    body       schema of a JSON body
    """
    made: Object = {"responses": responses, "security": list(security)}
    if summary:
        made["summary"] = summary
    if body is not None:
        made["requestBody"] = {"required": True, "content": {JSON: {"schema": body}}}
    if parameters:
        made["parameters"] = list(parameters)
    return made


def open_get(summary: str, responses: Object) -> Object:
    """Return the description of a path that is read without a token."""
    return {"get": operation(responses, summary=summary, security=OPEN)}


def response(description: str, schema: Object, kind: str = JSON) -> Object:
    """Return a response whose body has the media type `kind`."""
    return {"description": description, "content": {kind: {"schema": schema}}}


def failures(reasons: Mapping[str, str], schema: Object) -> Object:
    """Return status -> response for `reasons`, each with a body of `schema`."""
    return {status: response(reason, schema) for status, reason in reasons.items()}


def parameter(name: str, place: str, schema: Object = STRING) -> Object:
    """Return a required parameter; `place` is "path" or "query"."""
    return {"name": name, "in": place, "required": True, "schema": schema}


def serve_document(describe: Callable[[], Object]) -> Handler:
    """Return the handler of `GET /openapi.json`."""

    async def openapi(_: web.Request) -> web.StreamResponse:
        return web.json_response(describe())

    return openapi
