"""What a check of `foray doctor` gives: one thing that was checked, the verdict, and how to fix it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from protocol.errors import UserError

Verdict = Literal["ok", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `fix` is empty when it is in order, a command where one does it."""

    check: str
    verdict: Verdict
    detail: str
    fix: str = ""
    why: str = ""

    @classmethod
    def of(cls, check: str, error: UserError, verdict: Verdict = "fail") -> Finding:
        """Return what a process would end with, found before it starts."""
        return cls(check, verdict, error.what, error.todo, error.why)

    def error(self) -> UserError:
        """As an error."""
        return UserError(f"{self.check}: {self.detail}", why=self.why, todo=self.fix)


class NotReady(UserError):
    """Findings that would stop a run: nothing has been started."""

    def __init__(self, failed: Sequence[Finding]) -> None:
        first = failed[0].error()
        super().__init__(first.what, first.why, first.todo)
        self.failed = tuple(failed)

    def render(self) -> str:
        """All of them, not only the first."""
        return "\n".join([*(finding.error().render() for finding in self.failed), "nothing was started"])
