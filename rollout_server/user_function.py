"""Functions of users, named "module:function" in the settings: async in the event loop, plain ones in threads."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import threading
from collections.abc import Mapping
from typing import Any

from protocol.errors import UserError


class UserFunction:
    """Calls a user's function with further keyword arguments.

    An `async def` runs in the event loop and must not block. A plain function runs in one of `threads` threads. Raises
    UserError if it cannot be imported, or does not accept `arguments` (their names) and the options.
    """

    def __init__(self, what: str, target: str, options: Mapping[str, Any], threads: int, *arguments: str) -> None:
        module, _, name = target.partition(":")
        try:
            self._function = getattr(importlib.import_module(module), name)
            inspect.signature(self._function).bind(*arguments, **options)
        except Exception as error:  # importing runs the user's code, which may fail in any way
            raise UserError(
                f"the {what} {target!r} cannot be used",
                why=f"{type(error).__name__}: {error}",
                todo=f"make it importable (PYTHONPATH), with {' and '.join(arguments)} and its `options` as parameters",
            ) from error
        calls = getattr(self._function, "__call__", None)  # noqa: B004 - an object may have an async __call__
        self._in_loop = inspect.iscoroutinefunction(self._function) or inspect.iscoroutinefunction(calls)
        self.name, self._options, self._places = what, options, asyncio.Semaphore(threads)

    async def __call__(self, *arguments: Any) -> Any:
        """Return its result. Raises what it raises."""
        if self._in_loop:
            return await self._function(*arguments, **self._options)
        return await self._in_thread(*arguments)

    async def _in_thread(self, *arguments: Any) -> Any:
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
                result = self._function(*arguments, **self._options)
            except Exception as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                loop.call_soon_threadsafe(settle, result, failed)

        await self._places.acquire()
        threading.Thread(target=work, name=self.name, daemon=True).start()
        return await done
