"""A key from the environment. It has no repr, and is cut out of every text that could be shown or kept."""

from __future__ import annotations

import json
import os
from urllib.parse import quote, quote_plus

from protocol.errors import UserError

SHORTEST = 8
"""Characters: what is shorter is no key, and could not be cut out of texts without harming them."""


class Secret:
    """One key. `reveal` is called where it is sent, nowhere else."""

    def __init__(self, value: str) -> None:
        self._value = value
        forms = {value, quote(value, safe=""), quote(value), quote_plus(value), json.dumps(value)[1:-1]}
        self._forms = sorted(forms, key=len, reverse=True)

    def __repr__(self) -> str:
        return "Secret(..)"

    def reveal(self) -> str:
        """The key itself."""
        return self._value

    def cut_from(self, text: str) -> str:
        """The text with `[key]` in place of the key, also where it is escaped as in an address or in JSON."""
        for form in self._forms:
            text = text.replace(form, "[key]")
        return text


def read_secret(variable: str, what: str = "the key of the online search engine") -> Secret:
    """The key in an environment variable. UserError, without its value, where there is none or it cannot be one."""
    value = os.environ.get(variable, "").strip()
    if not value:
        raise UserError(
            f"the environment variable {variable} is not set",
            why=f"it holds {what}",
            todo=f"export {variable}=..., or name another variable; retriever.online.record=replay needs none",
        )
    if len(value) < SHORTEST or not value.isascii() or not value.isprintable() or " " in value:
        raise UserError(
            f"what the environment variable {variable} holds cannot be {what}",
            why=f"that has {SHORTEST} or more printable ASCII characters and no blanks",
            todo=f"export {variable} again, without quotes or line breaks in it",
        )
    return Secret(value)
