"""A tool that brings nothing: what stands for a tool of documents where searching is switched off."""

from __future__ import annotations

from rollout_server.tools.base import ToolResult


class NoTool:
    """Every call brings nothing, at once and without an error."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, argument: str) -> ToolResult:
        return ToolResult()

    async def close(self) -> None:
        return None
