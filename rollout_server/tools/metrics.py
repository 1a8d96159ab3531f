"""Tools that are counted: how many calls, how many of them the policy's mistake or the tool's failure, by cause."""

from __future__ import annotations

from dataclasses import replace

from rollout_server.environment.environment import Environment
from rollout_server.metrics import Stats
from rollout_server.tools.base import Tool, ToolResult


class InstrumentedTool:
    """Wraps any tool; the result is passed on as it is."""

    def __init__(self, tool: Tool, stats: Stats) -> None:
        self.name = tool.name
        self._tool, self._stats = tool, stats
        for kind in ("calls", "mistakes", "errors"):
            stats.counts[f"tool_{kind}_{self.name}"] += 0

    async def __call__(self, argument: str) -> ToolResult:
        with self._stats.waits.blocked_on("tool"):
            result = await self._tool(argument)
        counts = self._stats.counts
        counts[f"tool_calls_{self.name}"] += 1
        counts[f"tool_mistakes_{self.name}"] += bool(result.mistake)
        counts[f"tool_errors_{self.name}"] += bool(result.error)
        if result.error:
            counts[f"tool_failures_{self.name}/{result.error}"] += 1
        return result

    async def close(self) -> None:
        await self._tool.close()


def with_instrumented_tools(environment: Environment, stats: Stats) -> Environment:
    """The same episode, whose tools count into `stats` (`tool_calls_<name>` and so on, shown as zeros from now on)."""
    return replace(environment, tools={name: InstrumentedTool(tool, stats) for name, tool in environment.tools.items()})
