"""Text from a language model, for the methods: an engine of a run, or an OpenAI-compatible endpoint.

A prompt is pieces of text with an author: Foray's own pieces may contain control tokens (tags of the demo's model),
those of others (questions, passages) may not.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from protocol.errors import ForayError, UserError
from protocol.messages import EngineInfo, Sampling
from protocol.runtime.http.auth import engine_key, read_access
from protocol.runtime.timing import PATIENCE, backoff_s
from rollout_server.engine.base import Completion, EngineError, GenerateRequest
from rollout_server.environment.tokenizer import TrajectoryTokenizer
from rollout_server.rewards.base import RewardError
from rollout_server.rewards.remote import EndpointSettings, JsonEndpoint
from rollout_server.rewards.resources import RewardResources

if TYPE_CHECKING:
    import aiohttp

API_KEY = "OPENAI_API_KEY"
"""Variable with the API key of an endpoint, sent if it is set."""
OUTAGE_S, PAUSE_S, LONGEST_PAUSE_S = 300.0, 1.0, 10.0
"""How long a turn waits for engines that fail, in seconds, and the first and longest pause; the node restarts an
engine that hangs or has ended (`engine.start_timeout_s`)."""
MOST_USAGE = 10_000_000
"""Most tokens of one turn that are believed."""
TURN_S = 600.0
"""Timeout of one turn, in seconds: PATIENCE slow steps of the engine for each token, if that is more."""


class EpisodeFailed(ForayError):
    """An episode cannot be completed. `cause` is stored; `prompt_too_long` is final, the others may be retried."""

    def __init__(self, cause: str, detail: str = "") -> None:
        super().__init__(f"{cause}: {detail}" if detail else cause)
        self.cause = cause


@dataclass(frozen=True)
class PromptPiece:
    """A part of a prompt. trusted: Foray's own text, in which control tokens are recognised."""

    text: str
    trusted: bool = False


@dataclass(frozen=True)
class ModelPrompt:
    """One user message (or plain text, if the model has no chat template or `chat` is False), and how the reply starts.

    reply  text that the model has written already: it continues there
    """

    pieces: tuple[PromptPiece, ...]
    chat: bool = True
    reply: str = ""

    @property
    def text(self) -> str:
        """Return the text of all pieces."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Generated:
    """What the model wrote, without the stop string.

    tokens         (text, natural log-prob) of each token; empty if the endpoint reports none
    num_tokens     tokens generated; num_read: tokens of the prompt
    stopped        a stop string or the end-of-sequence token ended it, and not the limit
    version        policy version that wrote it, "" if unknown
    """

    text: str
    tokens: tuple[tuple[str, float], ...]
    num_tokens: int
    num_read: int
    stopped: bool
    version: str = ""


class LanguageModel(Protocol):
    """A model that continues prompts. `has_logprobs`: it reports the log-prob of each token and continues a reply."""

    has_logprobs: bool

    async def complete(
        self, prompt: ModelPrompt, *, max_tokens: int, stop: Sequence[str], sampling: Sampling
    ) -> Generated:
        """Continue `prompt`. Raises EpisodeFailed."""


def encode(prompt: ModelPrompt, tokenizer: TrajectoryTokenizer) -> list[int]:
    """Return the token ids of a prompt. Only trusted pieces produce control tokens, besides the chat template's."""
    reply = tokenizer.encode_untrusted(prompt.reply) if prompt.reply else []
    if prompt.chat:
        return tokenizer.prompt("", prompt.text, "", chat=True) + reply
    prefix = tokenizer.prompt("", "", "", chat=False)
    separate = [
        ids
        for piece in prompt.pieces
        for ids in (tokenizer.encode_trusted if piece.trusted else tokenizer.encode_untrusted)(piece.text)
    ]
    whole = tokenizer.encode_trusted(prompt.text)
    # as one text, as in the model's training, unless a text of others would become a control token
    same = [i for i in whole if i in tokenizer.control_ids] == [i for i in separate if i in tokenizer.control_ids]
    return prefix + (whole if same else separate) + reply


def cut_at_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text before the first stop string, and whether there is one."""
    places = [place for word in stop if (place := text.find(word)) >= 0]
    return (text[: min(places)], True) if places else (text, False)


class EngineModel:
    """The engines of a run, used in turn. `max_context`: most tokens of prompt and reply together."""

    has_logprobs = True

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engines: Sequence[EngineInfo],
        tokenizer: TrajectoryTokenizer,
        max_context: int,
    ) -> None:
        from rollout_server.engine.admin import EngineAdmin
        from rollout_server.engine.client import SglangClient

        access = read_access(os.environ)
        self._tokenizer, self._max_context = tokenizer, max_context
        self._clients = itertools.cycle(
            [
                (
                    SglangClient(
                        session,
                        engine.url,
                        name=engine.id,
                        adapter=engine.adapter,
                        key=engine_key(access, engine.id, engine.incarnation),
                    ),
                    engine.version.label,
                    EngineAdmin(
                        session, engine.url, name=engine.id, key=engine_key(access, engine.id, engine.incarnation)
                    ),
                )
                for engine in engines
            ]
        )

    async def complete(
        self, prompt: ModelPrompt, *, max_tokens: int, stop: Sequence[str], sampling: Sampling
    ) -> Generated:
        """Continue `prompt`. Raises EpisodeFailed."""
        ids = encode(prompt, self._tokenizer)
        limit = min(max_tokens, self._max_context - len(ids))
        if limit < 1:
            raise EpisodeFailed("prompt_too_long", f"{len(ids)} tokens of at most {self._max_context}")
        name = uuid.uuid4().hex
        request = GenerateRequest(
            ids=ids, session=name, group=name, max_new_tokens=limit, sampling=sampling, stop=stop, pinned=True
        )
        completion = await self._generate(request)
        text, cut = cut_at_stop(self._tokenizer.decode_turn(completion.ids), stop)
        return Generated(
            text,
            self._tokens(completion.ids, completion.logprobs, len(text)),
            len(completion.ids),
            len(ids),
            cut or completion.finish_reason == "stop",
            "+".join(dict.fromkeys(span.version.label for span in completion.spans)),
        )

    async def _generate(self, request: GenerateRequest) -> Completion:
        """Return what the next engine generates; wait for engines that fail. Raises EpisodeFailed."""
        failed_at = math.inf
        for failures in itertools.count(1):
            client, label, admin = next(self._clients)
            try:
                slow_s = PATIENCE * (await admin.loads())["pace_s"] * request.max_new_tokens
                return await client.generate(request, version=label, timeout_s=max(TURN_S, slow_s))
            except EngineError as error:
                failed_at, pause = min(failed_at, time.monotonic()), backoff_s(failures, PAUSE_S, LONGEST_PAUSE_S)
                final = error.fault == "request" or error.cause == "denied"
                if final or time.monotonic() + pause > failed_at + OUTAGE_S:
                    raise EpisodeFailed(error.cause, error.detail) from None
                await asyncio.sleep(pause)
        raise AssertionError("the loop ends by a return or an error")

    def _tokens(self, ids: Sequence[int], logprobs: Sequence[float], length: int) -> tuple[tuple[str, float], ...]:
        """Return (text, log-prob) of the tokens within the first `length` characters. A character may take several."""
        found, have = [], ""
        for number, logprob in enumerate(logprobs, 1):
            if len(have) >= length:
                break
            text = self._tokenizer.decode(ids[:number])
            found.append((text[len(have) :], logprob))
            have = text
        return tuple(found)


class ModelEndpoint(EndpointSettings):
    """An OpenAI-compatible endpoint."""

    type: Literal["endpoint"] = "endpoint"
    api: Literal["chat", "completions"] = "chat"
    """Route: /chat/completions, or /completions, which continues plain text and reports log-probs."""


class EndpointModel:
    """A model behind an OpenAI-compatible endpoint. With `chat` each prompt is one user message."""

    def __init__(self, settings: ModelEndpoint, resources: RewardResources) -> None:
        self._model, self._chat = settings.model, settings.api == "chat"
        self._endpoint = JsonEndpoint(settings, "/chat/completions" if self._chat else "/completions", resources)
        self.has_logprobs = not self._chat

    async def complete(
        self, prompt: ModelPrompt, *, max_tokens: int, stop: Sequence[str], sampling: Sampling
    ) -> Generated:
        """Continue `prompt`. Raises EpisodeFailed."""
        if self._chat and prompt.reply:
            raise EpisodeFailed("unsupported", "a chat endpoint does not continue a reply")
        said = {"messages": [{"role": "user", "content": prompt.text}]}
        return await self.send(
            said if self._chat else {"prompt": prompt.text + prompt.reply}, max_tokens, stop, sampling
        )

    async def send(
        self, said: Mapping[str, Any], max_tokens: int, stop: Sequence[str], sampling: Sampling
    ) -> Generated:
        """Send a request with `said` (messages or prompt). Raises EpisodeFailed."""
        body: dict[str, Any] = {
            **said,
            "model": self._model,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
        }
        body |= {"stop": list(stop)} if stop else {}
        body |= {"top_k": sampling.top_k} if sampling.top_k > 0 else {}  # no field of OpenAI's
        body |= {"logprobs": 1} if self.has_logprobs else {}
        try:
            return await self._endpoint.ask(body, lambda reply: read_reply(reply, stop))
        except RewardError as error:
            raise EpisodeFailed("endpoint", str(error)) from None


def read_reply(reply: Any, stop: Sequence[str]) -> Generated:
    """Return the text of a completion or chat completion. Raises KeyError, TypeError, IndexError or ValueError."""
    choice = reply["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    if not isinstance(text, str):
        raise ValueError("the reply has no text")
    usage, listed = reply.get("usage") or {}, choice.get("logprobs") or {}
    counted = [int(usage.get(f"{what}_tokens") or 0) for what in ("completion", "prompt")]
    if not 0 <= min(counted) <= max(counted) <= MOST_USAGE:
        raise ValueError(f"usage of {min(counted)} to {max(counted)} tokens")
    tokens = tuple(
        (str(token), float(logprob))
        for token, logprob in zip(listed.get("tokens") or (), listed.get("token_logprobs") or (), strict=True)
    )
    text, cut = cut_at_stop(text, stop)
    return Generated(
        text,
        tokens,
        counted[0] or len(tokens),
        counted[1],
        cut or choice.get("finish_reason") == "stop",
    )


def endpoint_settings(url: str, model: str, api: Literal["chat", "completions"], concurrency: int) -> ModelEndpoint:
    """Return the settings of an endpoint; its key is in OPENAI_API_KEY, if it needs one."""
    key = API_KEY if os.environ.get(API_KEY) else ""
    return ModelEndpoint(
        url=url, model=model, api=api, api_key_variable=key, deadline_s=TURN_S, concurrency=concurrency
    )


def only_model(url: str, timeout_s: float = 10.0) -> str:
    """Return the name of the model that an endpoint serves. Raises UserError if it serves none or several."""
    from http.client import HTTPException

    from protocol.runtime.http.client import ask, read_json

    try:
        with ask(f"{url}/models", timeout_s=timeout_s, token=os.environ.get(API_KEY, "")) as response:
            names = [str(card["id"]) for card in read_json(response)["data"]]
    except (OSError, HTTPException, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"cannot list the models of {url}", why=str(error)[:200], todo="correct the URL, or give --model NAME"
        ) from None
    if len(names) != 1:
        raise UserError(
            f"{url} serves {len(names)} models: {', '.join(names[:10])}", todo="choose one with --model NAME"
        )
    return names[0]
