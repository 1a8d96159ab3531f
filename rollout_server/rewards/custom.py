"""A reward of your own: `target: "module:function"`, called with the RewardInput and your `options`, returns a number.

An `async def` runs in the event loop, where it must not block. A plain function runs in a thread, so it may. What it
raises, a result that is not a number, and no result within the deadline are failures, never a score.
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
from rollout_server.rewards.base import RewardError, RewardInput, RewardSettingsBase


class Custom:
    """See the module."""

    def __init__(self, settings: CustomSettings) -> None:
        """Import the function. Raises UserError when it cannot be imported or does not take the options."""
        self.name = settings.key
        self._function = function = _load(settings)
        self._options = settings.options
        self._deadline_s = settings.deadline_s
        self._places = asyncio.Semaphore(settings.threads)
        calls = getattr(function, "__call__", None)  # noqa: B004 - an object may have an async __call__
        self._in_loop = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(calls)

    async def __call__(self, outcome: RewardInput) -> float:
        try:
            async with asyncio.timeout(self._deadline_s):
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
        """The result of a plain function. Its place is free again when it returns, however late, not when we give up.

        Not `asyncio.to_thread`: one that hangs would hold up the end of the process. A daemon thread is left behind.
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
            with contextlib.suppress(RuntimeError):  # the loop has ended: no caller waits
                loop.call_soon_threadsafe(settle, result, failed)

        await self._places.acquire()
        threading.Thread(target=work, name=self.name, daemon=True).start()
        return await done


class CustomSettings(RewardSettingsBase):
    """A function of yours as a reward."""

    type: Literal["custom"] = "custom"
    target: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, importable where the rollout server runs."""
    name: str = Field(default="", max_length=256)
    """Name among the rewards. Empty: the function's name."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""
    deadline_s: float = Field(default=10.0, gt=0)
    """Longest wait for one result."""
    threads: int = Field(default=8, ge=1)
    """Calls of a plain function at once; an `async def` has no such bound."""

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
            todo="it must be importable (PYTHONPATH) and take a RewardInput and its `options` by name",
        ) from error
    return function  # type: ignore[no-any-return]
