"""What an agent asks for, independent of the API's dialect; messages in a form that can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from protocol.errors import ForayError
from rollout_server.agents.formats import json_or_text
from rollout_server.agents.renderer import Message, Said, Tool, content_of, function_of

MAX_MESSAGES = 10_000
"""Maximum number of messages, items or tools in a call."""
IGNORED = frozenset(
    (
        *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
        *("repetition_penalty", "tool_choice", "parallel_tool_calls", "reasoning_effort", "reasoning", "truncation"),
    )
)
"""Ignored parameters that are counted by name: sampling is the run's. Other ignored ones are counted together."""
_FREE: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "response_format": ({"type": "text"},),
    "text": ({"format": {"type": "text"}},),
    "modalities": (["text"],),
    **dict.fromkeys(("logprobs", "top_logprobs", "logit_bias", "functions", "function_call", "audio"), ()),
    **dict.fromkeys(("web_search_options", "previous_response_id", "conversation", "background", "prompt"), ()),
}
"""Parameters that the gateway does not serve -> values that ask for nothing, besides null, false, 0 and empty ones."""
B = TypeVar("B", bound=BaseModel)
ToolName = Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=256)


class CallRefused(ForayError):
    """The gateway does not answer a call: an HTTP status, OpenAI's error code, and the field that is wrong."""

    def __init__(self, message: str, *, status: int = 400, code: str = "unsupported_value", field: str = "") -> None:
        super().__init__(message)
        self.status, self.code, self.field = status, code, field

    def body(self) -> dict[str, Any]:
        """Return the error object of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.field or None, "code": self.code}}


@dataclass(frozen=True)
class Ask:
    """One call of the model.

    messages  in the form of chat completions; roles, contents and names of tools are checked
    limit     maximum tokens that the agent wants; None: that of the settings
    stop      further strings that end the turn; they are not part of the answer
    ignored   names of parameters that were given and have no effect
    usage     send the token counts in a stream of chat completions
    """

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    limit: int | None = None
    stop: tuple[str, ...] = ()
    model: str = ""
    stream: bool = False
    usage: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Turn:
    """One turn of the policy as the answer to a call. `created`: Unix time in seconds."""

    id: str
    said: Said
    length: bool
    prompt_tokens: int
    completion_tokens: int
    created: int

    def as_message(self) -> dict[str, Any]:
        """Return the assistant's message in the form of chat completions."""
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.said.calls
        ]
        return (
            {"role": "assistant", "content": self.said.content or (None if calls else "")}
            | ({"reasoning_content": self.said.reasoning} if self.said.reasoning else {})
            | ({"tool_calls": calls} if calls else {})
        )


class Normal(NamedTuple):
    """A message as far as it is compared. Reasoning is not: many clients drop it."""

    role: str
    content: str
    calls: tuple[tuple[str, str, str], ...] = ()
    answers: str = ""


def normalise(message: Message) -> Normal:
    """Return the comparable form: no content is "", parts are joined, arguments are canonical JSON."""
    functions = [(str(call["id"]), function_of(call)) for call in message.get("tool_calls") or ()]
    calls = tuple((name, str(f["name"]), canonical(str(f["arguments"]))) for name, f in functions)
    return Normal(message["role"], content_of(message).strip(), calls, message.get("tool_call_id") or "")


def canonical(arguments: str) -> str:
    """Return JSON with sorted keys; a text that is not JSON stays as it is."""
    value = json_or_text(arguments)
    return arguments if value is arguments else json.dumps(value, sort_keys=True)


class Given(BaseModel):
    """A part of a body. A field that is null is as good as left out."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: object) -> object:
        return {k: v for k, v in given.items() if v is not None} if isinstance(given, dict) else given


class Part(BaseModel):
    """A part of a content: text only."""

    type: Literal["text", "input_text", "output_text"]
    text: str


def _joined(content: str | list[Part]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


Content = Annotated[str | list[Part], AfterValidator(_joined)]
"""A content, as one text."""
Role = AfterValidator(lambda role: "system" if role == "developer" else role)


class BodyBase(Given, extra="allow"):
    """What both dialects have in common."""

    model: str = ""
    stream: bool = False
    stream_options: dict[str, Any] = Field(default_factory=dict)

    def ignored(self) -> tuple[str, ...]:
        """Return the parameters that have no effect. Raises CallRefused for one that cannot be ignored."""
        given = {name: value for name, value in (self.model_extra or {}).items() if value or value == 0}
        for name, value in given.items():
            if value and name in _FREE and value not in _FREE[name]:
                raise CallRefused(f"{name} is not supported by Foray's gateway: leave it out", field=name)
        return tuple(sorted({name if name in IGNORED else "other" for name in given.keys() - _FREE.keys()}))


def validated(kind: type[B], body: object, prefix: Sequence[str | int] = ()) -> B:
    """Return `body` as `kind`. Raises CallRefused that names the first wrong field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(str(part) for part in (*prefix, *first["loc"]))
        raise CallRefused(f"{where}: {first['msg']}", code="invalid_value", field=where) from None
