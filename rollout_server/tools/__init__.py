"""Tools that the policy may call: their settings and registry."""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from protocol.settings import union_of
from rollout_server.tools.base import Tool, ToolSettingsBase
from rollout_server.tools.fetch import FetchSettings
from rollout_server.tools.mcp import McpSettings
from rollout_server.tools.python import PythonSettings

REGISTRY: dict[type[ToolSettingsBase], str] = {
    FetchSettings: "rollout_server.tools.fetch:Fetch",
    McpSettings: "rollout_server.tools.mcp:Mcp",
    PythonSettings: "rollout_server.tools.python:Python",
}
"""Settings class -> "module:Class"; the class takes the settings and the URLs of the retrievers."""

if TYPE_CHECKING:
    ToolSettings = ToolSettingsBase
else:
    ToolSettings = union_of(REGISTRY)


def build_tool(settings: ToolSettingsBase, urls: Sequence[str] | None) -> Tool:
    """Instantiate the tool for `settings`. Does not connect.

    urls  the retrievers of the search, which may change; None: it has none
    Raises UserError for a tool that cannot work on this machine.
    """
    tool: Tool = resolve_name(REGISTRY[type(settings)])(settings, urls)
    return tool
