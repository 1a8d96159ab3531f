"""Custom rewards: `target: "module:function"` is called with the RewardInput and your `options`, and returns a number.

An `async def` runs in the event loop and must not block. A plain function runs in a thread and may block. Exceptions,
results that are not numbers, and timeouts are failures, never a score.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import threading
from collections.abc import Callable
from typing import Any, Literal

from pydantic import Field

from protocol.errors import UserError
from protocol.runtime.timing import loop_timeout
from rollout_server.rewards.base import RewardError, RewardInput, RewardSettingsBase


class Custom:
    """A reward computed by a user's function."""

    def __init__(self, settings: CustomSettings) -> None:
        """Import the function. Raises UserError if it cannot be imported or does not accept the options."""
        self.name = settings.key
        self._function = function = _load(settings)
        self._options = settings.options
        self._deadline_s = settings.deadline_s
        self._places = asyncio.Semaphore(settings.threads)
        calls = getattr(function, "__call__", None)  # noqa: B004 - an object may have an async __call__
        self._in_loop = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(calls)

    async def __call__(self, outcome: RewardInput) -> float:
        try:
            async with loop_timeout(self._deadline_s):
                if self._in_loop:
                    result = await self._function(outcome, **self._options)
                else:
                    result = await self._in_thread(outcome)
            return float(result)
        except TimeoutError:
            raise RewardError(f"{self.name}: no result within {self._deadline_s:g} s") from None
        except RewardError:
            raise
        except Exception as error:
            raise RewardError(f"{self.name}: {type(error).__name__}: {error}") from error

    async def _in_thread(self, outcome: RewardInput) -> Any:
        """Return the result of a plain function. Its slot is freed when the function returns, not at the timeout.

        Uses a daemon thread instead of `asyncio.to_thread`, since a hanging function would delay the exit.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            self._places.release()
            if done.done():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        def work() -> None:
            result, failed = None, None
            try:
                result = self._function(outcome, **self._options)
            except Exception as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(settle, result, failed)

        await self._places.acquire()
        threading.Thread(target=work, name=self.name, daemon=True).start()
        return await done


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
    threads: int = Field(default=8, ge=1)
    """Maximum concurrent calls of a plain function. Not used for an `async def`."""

    @property
    def key(self) -> str:
        return self.name or self.target.partition(":")[2]


def _load(settings: CustomSettings) -> Callable[..., Any]:
    module, _, name = settings.target.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
        inspect.signature(function).bind(None, **settings.options)
    except Exception as error:  # importing runs the user's code, which may fail in any way
        raise UserError(
            f"the custom reward {settings.target!r} cannot be used",
            why=f"{type(error).__name__}: {error}",
            todo="make it importable (PYTHONPATH), with a RewardInput and its `options` as parameters",
        ) from error
    return function  # type: ignore[no-any-return]
