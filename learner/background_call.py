"""One call in a separate thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundCall(Generic[T]):
    """Calls `call` in a thread named `name`, which does not keep the process alive."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._call = call
        self._ended = threading.Event()
        self._value: list[T] = []
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def ended(self) -> bool:
        """Return whether `result` would return or raise at once."""
        return self._ended.is_set()

    def result(self) -> T:
        """Wait for the end of the call. Return its value, or raise its exception."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()
