"""What turns an agent's messages into token ids, and sampled ids into a message."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Message = Mapping[str, Any]
"""One message in the form of OpenAI's chat completions: role, content, tool_calls, tool_call_id, reasoning_content."""
Tool = Mapping[str, Any]
"""One tool in the form of OpenAI's chat completions: `{"type": "function", "function": {name, parameters, ..}}`."""


class NotAppendable(Exception):
    """The new messages cannot follow the recorded tokens unchanged: the next call begins a new sequence.

    str() is the reason, which metrics and `foray replay` show.
    """


@dataclass(frozen=True)
class Call:
    """One call of a tool.

    id         made by the renderer: unique in the trajectory
    arguments  as the policy wrote them: a JSON object as text
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Said:
    """What the policy said in one turn. A call that does not parse stays text."""

    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True)
class TemplateVerdict:
    """What a renderer can do with a model's chat template, found at start.

    sequences  one: a trajectory stays one sequence; user: a later message of the user begins a new one; no_tools: for
               agents without tools only; refused: not at all
    reason     why; "" for one
    """

    sequences: Literal["one", "user", "no_tools", "refused"]
    reason: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (_VERDICTS[self.sequences], self.reason and f"({self.reason})")))


_VERDICTS = {
    "one": "a trajectory is one sequence",
    "user": "a message of the user after the first turn begins a new sequence",
    "no_tools": "agents without tools only",
    "refused": "cannot be used by agents",
}


class Renderer(Protocol):
    """Renders prompts and reads turns for one model. It is stateless: one serves all trajectories.

    Messages are checked before: known roles, contents that are text or parts of text, names of tools `[\\w.-]+`.
    """

    def stops(self, tools: Sequence[Tool]) -> tuple[str, ...]:
        """Return the strings that end a turn besides the end tokens, for `GenerateRequest.stop`."""

    def begin(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
        """Return the ids of a whole prompt, up to the start of the assistant's turn. Raises UserError."""

    def go_on(self, new: Sequence[Message], tools: Sequence[Tool], last: Sequence[int], said: Said) -> list[int]:
        """Return the ids that follow a turn: its end, the `new` messages and the start of the next turn.

        last  ids that the policy sampled in that turn (its end token is among them, or is added)
        said  `read` of them

        Contents of messages become no control token. Raises NotAppendable.
        """

    def read(self, ids: Sequence[int], tools: Sequence[Tool]) -> Said:
        """Return the message that the sampled `ids` stand for."""

    def so_far(self, ids: Sequence[int], tools: Sequence[Tool]) -> Said:
        """Return what the first `ids` of a turn say already, whatever follows: `read` of the turn begins with it."""

    def verdict(self) -> TemplateVerdict:
        """Return what agents can do with this renderer. For a log at start and `foray doctor`."""


def new_id() -> str:
    """Return an id for a call: nine letters and digits, which is what Mistral's templates demand."""
    return uuid.uuid4().hex[:9]


def content_of(message: Message, key: str = "content") -> str:
    """Return the text of a message; parts are joined."""
    content = message.get(key) or ""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)


def function_of(call_or_tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a call or tool: its name, and its arguments or parameters."""
    found: Mapping[str, Any] = call_or_tool.get("function") or call_or_tool
    return found
