"""The public API: runs from Python, and what a reward, a search or a program outside this repository imports.

Only re-exports. Built-in rewards, tools and algorithms are added inside the repository (docs/extending.md).

run = foray.train_grpo(model, tokenizer, dataset, search_engine, epochs=3, lr=1e-5)

Names are imported on first access: the environment of a process may lack what another needs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.config import RunConfig as RunConfig
    from deploy.config import load_config as load_config
    from deploy.run.history import read_steps as read_steps
    from foray.api.evaluate import Evaluation as Evaluation
    from foray.api.evaluate import evaluate as evaluate
    from foray.api.run import Run as Run
    from foray.api.run import RunFailed as RunFailed
    from foray.api.searcher import LocalSearch as LocalSearch
    from foray.api.searcher import Searcher as Searcher
    from foray.api.serve import PolicyServer as PolicyServer
    from foray.api.serve import serve as serve
    from foray.api.train import train_grpo as train_grpo
    from learner.algorithms.base import Algorithm as Algorithm
    from learner.algorithms.base import LossOutput as LossOutput
    from learner.algorithms.base import TokenInputs as TokenInputs
    from learner.checkpoint.journal import read_journal as read_journal
    from learner.config.learner import LearnerSettings as LearnerSettings
    from protocol.errors import ForayError as ForayError
    from protocol.errors import UserError as UserError
    from protocol.messages import Question as Question
    from protocol.messages import Trajectory as Trajectory
    from protocol.messages import TrajectoryGroup as TrajectoryGroup
    from protocol.search import Passage as Passage
    from protocol.settings import RunSettings as RunSettings
    from protocol.settings import Settings as Settings
    from retriever.config import RetrieverSettings as RetrieverSettings
    from rollout_server.config import RolloutSettings as RolloutSettings
    from rollout_server.environment.environment import Environment as Environment
    from rollout_server.environment.environment import build_environment as build_environment
    from rollout_server.environment.tokenizer import load_tokenizer as load_tokenizer
    from rollout_server.node.config import NodeSettings as NodeSettings
    from rollout_server.rewards.base import Reward as Reward
    from rollout_server.rewards.base import RewardError as RewardError
    from rollout_server.rewards.base import RewardInput as RewardInput
    from rollout_server.rewards.base import RewardSettingsBase as RewardSettingsBase
    from rollout_server.rewards.base import TurnReward as TurnReward
    from rollout_server.rewards.base import TurnText as TurnText
    from rollout_server.search.base import Search as Search
    from rollout_server.search.base import SearchResult as SearchResult
    from rollout_server.tools.base import Tool as Tool
    from rollout_server.tools.base import ToolResult as ToolResult
    from rollout_server.tools.base import ToolSettingsBase as ToolSettingsBase

_MODULES = {
    "deploy.config": ("RunConfig", "load_config"),
    "deploy.run.history": ("read_steps",),
    "foray.api.evaluate": ("Evaluation", "evaluate"),
    "foray.api.run": ("Run", "RunFailed"),
    "foray.api.searcher": ("LocalSearch", "Searcher"),
    "foray.api.serve": ("PolicyServer", "serve"),
    "foray.api.train": ("train_grpo",),
    "learner.algorithms.base": ("Algorithm", "LossOutput", "TokenInputs"),
    "learner.checkpoint.journal": ("read_journal",),
    "learner.config.learner": ("LearnerSettings",),
    "protocol.errors": ("ForayError", "UserError"),
    "protocol.messages": ("Question", "Trajectory", "TrajectoryGroup"),
    "protocol.search": ("Passage",),
    "protocol.settings": ("RunSettings", "Settings"),
    "retriever.config": ("RetrieverSettings",),
    "rollout_server.config": ("RolloutSettings",),
    "rollout_server.environment.environment": ("Environment", "build_environment"),
    "rollout_server.environment.tokenizer": ("load_tokenizer",),
    "rollout_server.node.config": ("NodeSettings",),
    "rollout_server.rewards.base": (
        *("Reward", "RewardError", "RewardInput", "RewardSettingsBase", "TurnReward", "TurnText"),
    ),
    "rollout_server.search.base": ("Search", "SearchResult"),
    "rollout_server.tools.base": ("Tool", "ToolResult", "ToolSettingsBase"),
}
_PLACES = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_PLACES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    """Return a public name from its module."""
    if name not in _PLACES:
        raise AttributeError(f"module 'foray' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted(_PLACES)
