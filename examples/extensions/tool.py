"""A tool: arithmetic.

Its line in `rollout_server.tools.REGISTRY`: `CalculatorSettings: "examples.extensions.tool:Calculator"`
"""

import ast
from typing import ClassVar, Literal

from rollout_server.tools.base import InflightCalls, ToolResult, ToolSettingsBase

OPERATORS = {ast.Add: float.__add__, ast.Sub: float.__sub__, ast.Mult: float.__mul__, ast.Div: float.__truediv__}


class CalculatorSettings(ToolSettingsBase):
    sentence: ClassVar[str] = "<calculate> 2 * (3 + 4) </calculate> returns the value between {open} and {close}."
    type: Literal["calculate"] = "calculate"


class Calculator(InflightCalls):
    name = "calculate"

    def __init__(self, settings: CalculatorSettings, urls: tuple[str, ...]) -> None:
        super().__init__(self.name)

    async def __call__(self, argument: str) -> ToolResult:
        return await self.run(_calculate(argument[:200].strip()))


async def _calculate(text: str) -> ToolResult:
    try:
        return ToolResult(str(_value(ast.parse(text, mode="eval").body)))
    except (ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        return ToolResult("That is no arithmetic.", mistake="no_arithmetic")


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.BinOp):
        return float(OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    return float(ast.literal_eval(node))
