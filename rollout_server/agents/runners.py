"""Runners: start an agent for one trajectory and return its result.

An agent that fails raises AgentError with a cause:

| cause | what happened |
|---|---|
| `agent_exit` | it ended with an error: an exit code, an exception, a status other than 200, a lost connection |
| `agent_timeout` | it did not end within `rollout.agent.deadline_s` |
| `agent_result` | its result is missing or not of the documented form |
| `agent_memory` | it ran out of memory |
| `agent_silent` | it ended without a call of the model |
| `agent_refused` | the gateway refused a request of it, and then it failed |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from aiohttp import ClientConnectorError, ClientError, ConnectionTimeoutError

from protocol.errors import ForayError
from protocol.messages import Question
from protocol.runtime.http.body import AnswerTooLarge, bounded_session, parse_json, read_bounded, read_start
from protocol.runtime.timing import backoff_s
from rollout_server.agents.config import CommandAgentSettings, HttpAgentSettings, PythonAgentSettings
from rollout_server.user_function import UserFunction

RESULT_BYTES, ERROR_BYTES = 1 << 20, 4096
"""Maximum size of a result, and what is kept of stderr: its end."""
KILL_S = 1.0
"""Time for the output of a killed agent: a process that left its group may hold the pipes for ever."""
OUT_OF_MEMORY = (b"MemoryError", b"out of memory", b"bad_alloc", b"Cannot allocate memory", b"Out of memory")
CAUSES = tuple(f"agent_{what}" for what in ("exit", "timeout", "result", "memory", "silent", "refused"))


class AgentError(ForayError):
    """An agent failed; `cause` is one of CAUSES."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


@dataclass(frozen=True)
class AgentAccess:
    """What an agent needs to call the model: `OpenAI(base_url=access.base_url, api_key=access.api_key)`."""

    base_url: str
    api_key: str


@dataclass(frozen=True)
class AgentResult:
    """What an agent returns. answer: None for the text of the last turn. reward: its own score, None for none."""

    answer: str | None = None
    reward: float | None = None


class Runner(Protocol):
    """Runs agents. Cancelling a call ends its agent."""

    async def __call__(self, question: Question, access: AgentAccess) -> AgentResult:
        """Run an agent to its end. Raises AgentError."""

    async def close(self) -> None:
        """Close connections. Safe to call twice."""


def result_of(value: object) -> AgentResult:
    """Return a result given as an AgentResult, a text, a mapping or None. Raises AgentError."""
    if isinstance(value, AgentResult):
        value = asdict(value)
    if value is None or isinstance(value, str):
        value = {"answer": value}
    if not isinstance(value, Mapping):
        raise AgentError("agent_result", f"expected an object with `answer`, got {type(value).__name__}")
    answer, reward = value.get("answer"), value.get("reward")
    if not (answer is None or (isinstance(answer, str) and len(answer) < RESULT_BYTES)):
        raise AgentError("agent_result", "`answer` must be a text of at most 1 MiB")
    number = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
    if not (reward is None or number):
        raise AgentError("agent_result", f"`reward` must be a finite number, not {str(reward)[:40]!r}")
    return AgentResult(answer, None if reward is None else float(reward))


def _task(question: Question) -> dict[str, Any]:
    """Return what an agent is told about its question."""
    told = {"question": question.text, "id": question.id, "meta": dict(question.meta)}
    return told | ({"answers": list(question.answers)} if question.answers else {})


class PythonRunner:
    """Calls a user's function."""

    def __init__(self, settings: PythonAgentSettings) -> None:
        """Import the function. Raises UserError."""
        arguments = "a Question", "an AgentAccess"
        self._call = UserFunction("agent", settings.target, settings.options, settings.concurrency, *arguments)

    async def __call__(self, question: Question, access: AgentAccess) -> AgentResult:
        try:
            value = await self._call(question, access)
        except MemoryError as error:
            raise AgentError("agent_memory", str(error)) from error
        except Exception as error:
            raise AgentError("agent_exit", f"{type(error).__name__}: {error}") from error
        return result_of(value)

    async def close(self) -> None:
        return None


class HttpRunner:
    """Asks a service to run an agent. It may restart or be busy: until the deadline it is tried again to connect."""

    def __init__(self, settings: HttpAgentSettings) -> None:
        self._url = settings.target
        self._session: Any = None

    async def __call__(self, question: Question, access: AgentAccess) -> AgentResult:
        self._session = self._session or bounded_session()
        attempt = 0
        while True:
            try:
                return await self._post(_task(question) | asdict(access))
            except (ClientConnectorError, ConnectionTimeoutError):  # nothing has been sent
                attempt += 1
                await asyncio.sleep(backoff_s(attempt, 0.1, 5.0))
            except AnswerTooLarge as error:
                raise AgentError("agent_result", str(error)) from error
            except (ClientError, ConnectionError, TimeoutError) as error:
                raise AgentError("agent_exit", f"{self._url}: {type(error).__name__}: {error}") from error

    async def _post(self, body: Mapping[str, Any]) -> AgentResult:
        async with self._session.post(self._url, json=body, allow_redirects=False) as response:
            if response.status != 200:
                said = await read_start(response, ERROR_BYTES)
                raise AgentError("agent_exit", f"{self._url}: status {response.status}: {said}")
            return _parsed(await read_bounded(response, RESULT_BYTES))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _parsed(raw: bytes) -> AgentResult:
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise AgentError("agent_result", f"no JSON: {error}: {raw[:200]!r}") from None
    if not isinstance(value, dict):
        raise AgentError("agent_result", f"no JSON object: {raw[:200]!r}")
    return result_of(value)


class CommandRunner:
    """Starts a process for each trajectory, in a process group of its own, which is killed at the end."""

    def __init__(self, settings: CommandAgentSettings) -> None:
        self._settings = settings
        # a limit set by a shell: a function between fork and exec is not safe in a process with threads
        limit = str(settings.memory_mb << 10)
        self._command = ("sh", "-c", 'ulimit -d "$0" && exec "$@"', limit, *settings.command)

    async def __call__(self, question: Question, access: AgentAccess) -> AgentResult:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FORAY_")}
        told = {
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_KEY": access.api_key,
            "FORAY_QUESTION": question.text,
            "FORAY_QUESTION_ID": question.id,
            "FORAY_TASK": json.dumps(_task(question)),
        }
        environment = inherited | self._settings.env | {n: text.replace("\0", " ") for n, text in told.items()}
        transport, process = await self._start(environment)
        try:
            await process.exited
        finally:
            _kill(transport)  # its children may still hold the pipes
            await asyncio.wait({process.closed}, timeout=KILL_S)
            transport.close()
        output, errors, code = process.stdout, bytes(process.stderr), transport.get_returncode()
        if code:
            memory = code == -signal.SIGKILL or any(words in errors for words in OUT_OF_MEMORY)
            said = errors.decode(errors="replace").strip()
            raise AgentError("agent_memory" if memory else "agent_exit", f"exit code {code}: {said[-500:]}")
        return _parsed(bytes(output).rstrip().rpartition(b"\n")[2])

    async def close(self) -> None:
        return None

    async def _start(self, environment: Mapping[str, str]) -> tuple[asyncio.SubprocessTransport, _Process]:
        """Start the process. Leaves none if the caller is cancelled. Raises AgentError."""
        start = asyncio.get_running_loop().subprocess_exec(
            _Process,
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            cwd=self._settings.directory,
            env=environment,
            start_new_session=True,
        )
        starting = asyncio.ensure_future(start)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                transport, _ = await starting
                _kill(transport)
                transport.close()
            raise
        except OSError as error:
            raise AgentError("agent_exit", f"cannot start {self._settings.command[0]}: {error}") from error


class _Process(asyncio.SubprocessProtocol):
    """Keeps the end of a process' output. `exited`: it has ended; `closed`: nobody holds its pipes any more.

    `asyncio.subprocess` has only the latter (before 3.12), for which a child of the process may be waited for.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.exited: asyncio.Future[None] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.stdout, self.stderr = bytearray(), bytearray()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        kept, most = (self.stdout, RESULT_BYTES) if fd == 1 else (self.stderr, ERROR_BYTES)
        kept += data
        del kept[:-most]

    def process_exited(self) -> None:
        if not self.exited.done():
            self.exited.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set_result(None)


def _kill(process: asyncio.SubprocessTransport) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.get_pid(), signal.SIGKILL)
