"""A registry names an implementation for every member of its settings union, and nothing else."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any, get_args

import pytest

from foray.evaluation import methods
from learner import weights
from learner.config import algorithm as algorithms
from learner.config.learner import PublishSettings
from learner.config.trackers import TrackerSettings
from learner.observability import trackers
from protocol.settings import union_of
from retriever import rerank
from retriever.backends.web import config as providers
from retriever.encoder import config as encoder
from retriever.index import config as index
from retriever.rerank.config import RerankSettings
from rollout_server import rewards, search, tools
from rollout_server.tools import sandbox

PRODUCT = ("learner.", "retriever.", "rollout_server.", "deploy.", "foray.")
REGISTRIES: dict[str, tuple[Any, dict[Any, str]]] = {
    "algorithms": (algorithms.AlgorithmSettings, algorithms.REGISTRY),
    "encoders": (encoder.EncoderSettings, encoder.REGISTRY),
    "methods": (union_of(methods.REGISTRY), methods.REGISTRY),
    "indexes": (index.IndexSettings, index.REGISTRY),
    "providers": (providers.WebSettings, providers.REGISTRY),
    "rerankers": (RerankSettings, rerank.REGISTRY),
    "rewards": (rewards.RewardSettings, rewards.REGISTRY),
    "sandboxes": (sandbox.SandboxSettings, sandbox.REGISTRY),
    "searches": (search.SearchSettings, search.REGISTRY),
    "tools": (tools.ToolSettings, tools.REGISTRY),
    "trackers": (TrackerSettings, trackers.REGISTRY),
    "weights": (PublishSettings, weights.REGISTRY),
}


def members(union: Any) -> list[type]:
    """The settings classes of an annotated union; each may be annotated by itself. A union of one is its member."""
    if isinstance(union, type):
        return [union]
    return [get_args(member)[0] if get_args(member) else member for member in get_args(get_args(union)[0])]


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_member_of_the_union_is_registered(name: str) -> None:
    union, registry = REGISTRIES[name]
    found = members(union)
    # in the same process the simulation registers another publisher
    shipped = {settings for settings in registry if settings.__module__.startswith(PRODUCT)}
    assert found and shipped == set(found)


@pytest.mark.parametrize("name", REGISTRIES)
def test_every_registered_name_can_be_called(name: str) -> None:
    for settings, target in REGISTRIES[name][1].items():
        assert callable(resolve_name(target)), f"{settings.__name__}: {target}"


@pytest.mark.parametrize("name", REGISTRIES)
def test_settings_have_fields_and_build_nothing(name: str) -> None:
    for settings in members(REGISTRIES[name][0]):
        assert not {"build", "open", "provider", "identity"} & set(dir(settings)), settings.__name__
