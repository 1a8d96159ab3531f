"""Settings of agents: who plays a trajectory. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from protocol.settings import Settings, union_of


class AgentSettingsBase(Settings):
    """Base of all settings of agents."""

    type: str


class BuiltinAgentSettings(AgentSettingsBase):
    """Foray's loop: the template's tags, the search of `rollout.search`, and the tools of `rollout.episode`."""

    type: Literal["builtin"] = "builtin"


class OwnAgentSettings(AgentSettingsBase):
    """What all agents have in common that call the gateway (docs/agents.md)."""

    host: str = "127.0.0.1"
    """Address at which the gateway listens."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the gateway; 0 picks a free one."""
    url: str = Field(default="", pattern=r"^(https?://\S+)?$")
    """Base URL that agents get, without `/v1`, if they reach the gateway by another address. Empty: its own."""
    deadline_s: float = Field(default=300.0, gt=0)
    """Time of one trajectory in seconds. Time in calls of the gateway is not counted: engines may be busy or away."""
    concurrency: int = Field(default=256, ge=1)
    """Maximum number of agents that run at the same time. Others wait for a place."""
    reward: Literal["foray", "agent"] = "foray"
    """foray: `rollout.episode.rewards` score the trajectory, and a reward in the agent's result is only recorded.
    agent: the result's `reward`; the agent gets the gold answers. 0 for a trajectory that reached a limit, if the agent
    then failed."""
    gateway_search: bool = False
    """The agent searches by POST /v1/search of the gateway, so rewards may read the passages it found."""
    renderer: Literal["auto", "native", "tags"] = "auto"
    """How messages become tokens. native: by the model's chat template. tags: by the template of `rollout.episode`, as
    in the built-in loop. auto: native if the model has a chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables of the chat template, e.g. `enable_thinking: false`."""
    lenient: bool = False
    """A text of the assistant that contains the id of a recorded call stands for the message with the call, as
    smolagents writes it. Fewer sequences; the policy sees its call as it wrote it."""


class CommandAgentSettings(OwnAgentSettings):
    """A process for each trajectory; its last line on stdout is JSON: `{"answer": ..., "reward": ...}`."""

    type: Literal["command"] = "command"
    command: tuple[str, ...] = Field(min_length=1)
    """Program and arguments. Its environment has OPENAI_BASE_URL, OPENAI_API_KEY, FORAY_QUESTION, FORAY_QUESTION_ID
    and FORAY_TASK (the question as JSON), and none of Foray's secrets."""
    env: dict[str, str] = Field(default_factory=dict)
    """Further environment variables."""
    directory: Path | None = None
    """Working directory. null: that of the rollout server."""
    memory_mb: int = Field(default=2048, ge=64)
    """Limit of the data of each of its processes (RLIMIT_DATA), in MiB."""
    concurrency: int = Field(default=8, ge=1)
    """Maximum number of processes at the same time. A start costs 0.7 to 4.5 s of a core."""


class PythonAgentSettings(OwnAgentSettings):
    """A function of yours in the rollout server: `async def agent(question, access, **options)`."""

    type: Literal["python"] = "python"
    target: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """`package.module:function`, which the rollout server must be able to import (PYTHONPATH). An `async def` runs in
    the event loop and must not block; a plain function runs in a thread."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to every call."""


class HttpAgentSettings(OwnAgentSettings):
    """A service that runs agents: one POST for each trajectory, answered with the result."""

    type: Literal["http"] = "http"
    target: str = Field(pattern=r"^https?://\S+$")
    """URL. The body has `base_url`, `api_key`, `question`, `id` and `meta`; the answer is that of a command."""


REGISTRY: dict[type[AgentSettingsBase], str] = {
    BuiltinAgentSettings: "",
    CommandAgentSettings: "rollout_server.agents.runners:CommandRunner",
    PythonAgentSettings: "rollout_server.agents.runners:PythonRunner",
    HttpAgentSettings: "rollout_server.agents.runners:HttpRunner",
}
"""Settings class -> "module:Class" of its runner; the class takes the settings. The built-in loop has none."""

if TYPE_CHECKING:
    AgentSettings = AgentSettingsBase
else:
    AgentSettings = union_of(REGISTRY)
