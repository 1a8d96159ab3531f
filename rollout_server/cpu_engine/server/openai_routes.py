"""OpenAI's routes (completions, chat, models) and SGLang's tokenize and detokenize.

They allow other programs to evaluate a policy during training: lm-evaluation-harness, the openai client, curl.
"""

from __future__ import annotations

import time
from datetime import UTC, date, datetime
from pathlib import Path

from aiohttp import web

from protocol.errors import UserError
from protocol.runtime.files import read_json_object
from rollout_server.cpu_engine.model.tokenizer import Tokenizer
from rollout_server.cpu_engine.server.generate import Generation, failure, send_whole
from rollout_server.cpu_engine.server.lora import LoraRoutes
from rollout_server.cpu_engine.server.openai_answers import Kind, Object, OpenAIResponse
from rollout_server.cpu_engine.server.openai_bodies import CompletionCall, chat, completion, conversation
from rollout_server.cpu_engine.server.validation import (
    BadRequest,
    Body,
    Limits,
    check_ids,
    encode,
    is_large,
    optional,
    read_json,
    read_object,
    unblocked,
)
from rollout_server.environment.tokenizer import ChatTemplate, load_chat_template


class OpenAIRoutes:
    """Handlers. The model's name is the last part of `model_path`.

    `day` is the date for chat templates that contain one; None: the day of the start (UTC).
    """

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer,
        limits: Limits,
        adapters: LoraRoutes,
        model_path: Path,
        day: date | None = None,
    ) -> None:
        self._generation, self._tokenizer, self._limits, self._adapters = generation, tokenizer, limits, adapters
        self._path, self.name = model_path, model_path.name or "model"
        self._started = int(time.time())
        self._day = day or datetime.fromtimestamp(self._started, UTC).date()
        self._template: ChatTemplate | None = None

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self.completions),
            web.post("/v1/chat/completions", self.chat_completions),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{model}", self.model),
            *(web.post(path, self.tokenize) for path in ("/tokenize", "/v1/tokenize")),
            *(web.post(path, self.detokenize) for path in ("/detokenize", "/v1/detokenize")),
        ]

    async def completions(self, http: web.Request) -> web.StreamResponse:
        body = await read_json(http)
        asked = await unblocked(
            await is_large(http), lambda: completion(body, self._adapter, self._tokenizer, self._limits)
        )
        return await self._answer(http, "text_completion", asked)

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        body = await read_json(http)
        asked = await unblocked(
            await is_large(http), lambda: chat(body, self._adapter, self._render, self._tokenizer, self._limits)
        )
        return await self._answer(http, "chat.completion", asked)

    async def models(self, _: web.Request) -> web.Response:
        """List the base model and the loaded adapters."""
        cards = [self._card(name) for name in (self.name, *self._adapters.table())]
        return web.json_response({"object": "list", "data": cards})

    async def model(self, http: web.Request) -> web.Response:
        name = http.match_info["model"]
        self._adapter(name)
        return web.json_response(self._card(name))

    async def tokenize(self, http: web.Request) -> web.Response:
        """Tokenize `prompt` (a text or a list of texts) or `messages`."""
        body = await read_object(http)
        prompt, special = body.get("prompt"), optional(body, "add_special_tokens", bool, True)
        if (prompt is None) == (body.get("messages") is None):
            raise BadRequest("give either prompt or messages")
        if prompt is None:

            def work() -> list[list[int]]:
                return [conversation(body, self._render, self._tokenizer)]
        else:
            texts = prompt if isinstance(prompt, list) else [prompt]
            if not all(isinstance(text, str) for text in texts):
                raise BadRequest("prompt must be a string or a list of strings")

            def work() -> list[list[int]]:
                return [encode(self._tokenizer, text, "prompt", special) for text in texts]

        found = await unblocked(await is_large(http), work)
        counts = [len(ids) for ids in found]
        several = isinstance(prompt, list)
        answer = {"tokens": found if several else found[0], "count": counts if several else counts[0]}
        return web.json_response({**answer, "max_model_len": self._limits.context})

    async def detokenize(self, http: web.Request) -> web.Response:
        """Convert `tokens` (ids, or a list of lists of ids) to text."""
        body = await read_object(http)
        tokens, skip = optional(body, "tokens", list, []), optional(body, "skip_special_tokens", bool, True)
        several = bool(tokens) and isinstance(tokens[0], list)
        for ids in tokens if several else [tokens] if tokens else []:
            check_ids(ids, self._limits.vocab)
        if several:
            return web.json_response({"text": [self._tokenizer.decode(ids, skip) for ids in tokens]})
        return web.json_response({"text": self._tokenizer.decode(tokens, skip)})

    async def _answer(self, http: web.Request, kind: Kind, asked: CompletionCall) -> web.StreamResponse:
        generation = self._generation
        with generation.running(asked.parsed) as (requests, inbox):
            answers = OpenAIResponse(kind, asked, requests, self.name, int(time.time()), self._tokenizer)
            if asked.parsed.stream:
                return await generation.send(http, requests, inbox, answers.chunk, answers.last)
            await generation.ended(requests, inbox)
            if failed := failure(requests):
                return failed
            label = generation.label
            return await send_whole(requests, lambda: answers.whole(label))

    def _adapter(self, model: str) -> str:
        """Return the adapter named by `model` ("ADAPTER" or "BASE:ADAPTER"); "" for the base model.

        Deviation: SGLang accepts any name. Here an unknown name is 404, as in vLLM.
        """
        if model in ("", "default", self.name, str(self._path)):
            return ""
        name = model.removeprefix(f"{self.name}:")
        if name not in self._adapters.table():
            raise web.HTTPNotFound(
                reason=f"the model {model!r:.200} does not exist; use {self.name!r} or one of its adapters"
            )
        return name

    def _card(self, name: str) -> Object:
        base = name == self.name
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "foray",
            "root": str(self._path) if base else self._adapters.table().get(name),
            "parent": None if base else self.name,
            "max_model_len": self._limits.context,
        }

    def _render(self, messages: list[Body], begin: bool, variables: Body) -> str:
        if self._template is None:
            config = read_json_object(self._path / "tokenizer_config.json")
            self._template = load_chat_template(self._path, config, self._day)
        if self._template is None:
            raise UserError("the model has no chat template", todo="use /v1/completions")
        return self._template.render_messages(messages, begin, variables)
