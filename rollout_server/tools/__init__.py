"""Tools that the policy may call: every kind by its settings, and the one place where they are built."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

from pydantic import Field

from rollout_server.tools.base import Tool, ToolBase
from rollout_server.tools.fetch import FetchSettings
from rollout_server.tools.python import PythonSettings

ToolSettings = Annotated[FetchSettings | PythonSettings, Field(discriminator="type")]
REGISTRY: dict[type[ToolBase], str] = {
    FetchSettings: "fetch:Fetch",
    PythonSettings: "python:build_python",
}


def build_tool(settings: ToolBase, urls: Sequence[str]) -> Tool:
    """Instantiate the tool for `settings`; nothing is connected yet. `urls`: the retrievers that searches go to.

    Raises UserError for a tool that cannot work here.
    """
    module, name = REGISTRY[type(settings)].split(":")
    tool: Tool = getattr(import_module(f"{__name__}.{module}"), name)(settings, urls)
    return tool
