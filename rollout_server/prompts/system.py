"""A tokenizer that says a system message first: for templates that have one."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

from protocol.errors import UserError
from rollout_server.chat_template import ChatTemplate, load_chat_template
from rollout_server.prompts.base import PromptTemplate
from rollout_server.tokens import Tokens


class WithSystem(ChatTemplate):
    """A chat template whose conversations begin with `system`. Raises UserError when it takes no system message."""

    def __init__(self, plain: ChatTemplate, system: str) -> None:
        self._system = system
        super().__init__(plain.source, plain._special, plain.day)

    def render(self, message: str) -> str:
        conversation = [{"role": "system", "content": self._system}, {"role": "user", "content": message}]
        return self.render_messages(conversation, True, {})


def tokens_for(template: PromptTemplate, tokens: Tokens, model_dir: Path, day: date | None = None) -> Tokens:
    """What encodes the prompts of `template`: `tokens` itself, unless the template has a system message.

    Raises UserError when it has one and the tokenizer in `model_dir` cannot say it.
    """
    if not template.system:
        return tokens
    path = model_dir / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    plain = load_chat_template(model_dir, config, day)
    if plain is None:
        raise UserError(
            f"template {template.name!r} has a system message and the tokenizer has no chat template",
            why="only instruct models know what a system message is",
            todo="choose a template for base models (research_base), or an instruct model",
        )
    spec = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    return Tokens(spec, eos_ids=tokens.eos_ids, chat=WithSystem(plain, template.system))
