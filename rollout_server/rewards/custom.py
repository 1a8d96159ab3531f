"""Custom rewards: `target: "module:function"` is called with the RewardInput and your `options`, and returns a number.

An `async def` runs in the event loop and must not block. A plain function runs in a thread and may block. Exceptions,
results that are not numbers, and timeouts are failures, never a score.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from protocol.runtime.timing import loop_timeout
from rollout_server.rewards.base import RewardError, RewardInput, RewardSettingsBase
from rollout_server.user_function import UserFunction

THREADS = 8
"""Maximum concurrent calls of a plain function. Not used for an `async def`."""


class Custom:
    """A reward computed by a user's function."""

    def __init__(self, settings: CustomSettings) -> None:
        """Import the function. Raises UserError if it cannot be imported or does not accept the options."""
        self.name = settings.key
        self._deadline_s = settings.deadline_s
        self._function = UserFunction("custom reward", settings.target, settings.options, THREADS, "a RewardInput")
        self._function.name = self.name

    async def __call__(self, outcome: RewardInput) -> float:
        try:
            async with loop_timeout(self._deadline_s):
                return float(await self._function(outcome))
        except TimeoutError:
            raise RewardError(f"{self.name}: no result within {self._deadline_s:g} s") from None
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"{self.name}: {type(error).__name__}: {error}") from error


class CustomSettings(RewardSettingsBase):
    """A custom function as a reward."""

    type: Literal["custom"] = "custom"
    target: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, which the rollout server must be able to import (PYTHONPATH)."""
    name: str = Field(default="", max_length=249)
    """Name of the reward. Empty: the function's name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to every call."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Timeout of a call, in seconds."""

    @property
    def key(self) -> str:
        return self.name or self.target.partition(":")[2]
