"""The OpenAPI descriptions of the HTTP services match their routers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp import web

from protocol.runtime.http.auth import Access
from retriever.api import openapi as retriever_openapi
from retriever.api.app import create_app
from retriever.api.base import RetrieverState
from retriever.config import RetrieverSettings
from rollout_server.api import openapi as rollout_openapi
from rollout_server.api.app import build_app
from rollout_server.cpu_engine.server.admin import AdminRoutes
from rollout_server.cpu_engine.server.lora import LoraRoutes
from rollout_server.cpu_engine.server.openai_routes import OpenAIRoutes
from rollout_server.cpu_engine.server.validation import _KNOWN
from rollout_server.cpu_engine.server.weights import WeightRoutes
from tests.support import engine_openapi

Routes = set[tuple[str, str]]


def routes_of(app: web.Application) -> Routes:
    """(path, method) of every route; aiohttp answers HEAD wherever there is a GET."""
    routes = set()
    for route in app.router.routes():
        path = route.resource.canonical if route.resource is not None else ""
        routes |= {(path, route.method.lower())} if route.method != "HEAD" else set()
    return routes


def described(document: dict[str, Any]) -> Routes:
    return {(path, method) for path, methods in document["paths"].items() for method in methods}


def engine_app() -> web.Application:
    app, nothing = web.Application(), cast(Any, None)
    updates = WeightRoutes.__new__(WeightRoutes)
    routes = AdminRoutes(nothing, nothing, {}, {}).routes() + updates.routes() + LoraRoutes(nothing).routes()
    routes += OpenAIRoutes(nothing, nothing, nothing, nothing, Path("model")).routes()
    handler = routes[0].handler
    app.add_routes([web.post("/generate", handler), web.put("/generate", handler), *routes])
    return app


APPS = {
    "rollout": (lambda: build_app(cast(Any, None), Access()), rollout_openapi.describe),
    "retriever": (lambda: create_app(RetrieverState(RetrieverSettings())), retriever_openapi.describe),
    "engine": (engine_app, engine_openapi.describe),
}


@pytest.mark.parametrize("service", APPS)
async def test_a_description_names_exactly_the_routes_that_there_are(service: str) -> None:
    make, describe = APPS[service]
    assert described(describe()) == routes_of(make())


def test_the_engine_describes_every_sampling_parameter_that_it_knows() -> None:
    assert set(engine_openapi.SAMPLING["properties"]) == _KNOWN


@pytest.mark.parametrize("service", APPS)
def test_every_reference_in_a_description_leads_somewhere(service: str) -> None:
    document = APPS[service][1]()
    schemas = document["components"].get("schemas", {})

    def references(node: Any) -> list[str]:
        if isinstance(node, dict):
            own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
            return own + [found for value in node.values() for found in references(value)]
        return [found for value in node for found in references(value)] if isinstance(node, list) else []

    assert {name.rpartition("/")[2] for name in references(document)} <= schemas.keys()
