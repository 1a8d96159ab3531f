"""Prompt templates: the prompt, the format of observations, tags and stop strings.

A template is data, not code: a dataclass has all texts that the policy reads besides questions, passages and tool
results, so that it can be stored with a checkpoint and compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from protocol.errors import UserError
from protocol.runtime.files import read_json_object
from protocol.search import Passage
from rollout_server.environment.tokenizer import ChatTemplate, TrajectoryTokenizer, load_chat_template


@dataclass(frozen=True)
class PromptTemplate:
    """The texts of one protocol.

    name           name in the settings and in `TrajectoryGroup.template`
    prompt         first text, contains `{question}`
    chat           wrap the prompt as ONE user message with the tokenizer's chat template, if it has one
    system         system message before it; requires a tokenizer with a chat template
    question_mark  append "?" to a question without one
    passage        format of a passage: `{i}` from 1, `{contents}` (all of it), `{heading}` (unchanged title line),
                   `{title}` (without quotes), `{text}`
    passage_id     the same with the passage's `{id}`, used when a tool takes ids
    separator      between two passages
    observation    observation after a search, contains `{passages}`; its tags are written by the environment only
    empty          replaces the passages if the search found none
    failed         replaces the passages if the search failed and on_search_error is observe
    invalid        observation after a turn without an action; "": such a turn ends the trajectory
    stops          strings that end a turn, kept in its tokens
    tools_after    part of `prompt` or `system` after which the sentences of the enabled tools are inserted; "": before
                   `prompt`
    tool_failed    replaces the result of a tool that failed, if on_search_error is observe
    boxed          the answer is the content of the last \\boxed{} between the answer's tags; None without one
    """

    name: str
    prompt: str
    chat: bool
    question_mark: bool
    passage: str
    separator: str
    observation: str
    empty: str
    failed: str
    invalid: str
    passage_id: str
    tools_after: str = ""
    tool_failed: str = "The tool did not respond."
    stops: tuple[str, ...] = ("</search>", "</answer>")
    system: str = ""
    boxed: bool = False

    def format_question(self, question: str) -> str:
        """Return the question as it appears in the prompt."""
        text = question.strip()
        return text + "?" if self.question_mark and not text.endswith("?") else text

    @property
    def prompt_frame(self) -> tuple[str, str]:
        """Return the text before and after the question."""
        before, _, after = self.prompt.partition("{question}")
        return before, after

    @property
    def observation_frame(self) -> tuple[str, str]:
        """Return the text before and after the passages of an observation, with the tags."""
        before, _, after = self.observation.partition("{passages}")
        return before, after

    def format_passages(self, passages: Sequence[Passage]) -> str:
        """Return the text of the passages in order. Nothing is escaped here."""
        shown = (
            self.passage.format(
                i=i, id=p.id, contents=p.contents, title=p.title, heading=p.contents.partition("\n")[0], text=p.text
            )
            for i, p in enumerate(passages, 1)
        )
        return self.separator.join(shown).strip()

    def with_tools(self, tools: Sequence[tuple[str, str]], *, show_ids: bool) -> PromptTemplate:
        """Return this template with `tools`, each (tag, sentence); without tools, the template itself.

        The sentences are inserted after `tools_after`, the closing tags end a turn, and `show_ids` adds passage ids.
        """
        if not tools:
            return self
        opening, closing = (text.strip() for text in self.observation_frame)
        said = "".join(f"{sentence.format(open=opening, close=closing)} " for _, sentence in tools)
        prompt, system = self.prompt, self.system
        if not self.tools_after:
            prompt = said + prompt
        elif self.tools_after in system:
            system = system.replace(self.tools_after, self.tools_after + said, 1)
        else:
            prompt = prompt.replace(self.tools_after, self.tools_after + said, 1)
        return replace(
            self,
            name="+".join((self.name, *(tag for tag, _ in tools))),
            prompt=prompt,
            system=system,
            stops=(*self.stops, *(f"</{tag}>" for tag, _ in tools)),
            passage=self.passage_id if show_ids else self.passage,
        )


class SystemChatTemplate(ChatTemplate):
    """A chat template whose conversations start with `system`. Raises UserError if it rejects system messages."""

    def __init__(self, plain: ChatTemplate, system: str) -> None:
        self._system = system
        super().__init__(plain.source, plain._special, plain.day)

    def render(self, message: str) -> str:
        conversation = [{"role": "system", "content": self._system}, {"role": "user", "content": message}]
        return self.render_messages(conversation, True, {})


def tokenizer_for(
    template: PromptTemplate, tokenizer: TrajectoryTokenizer, model_dir: Path, day: date | None = None
) -> TrajectoryTokenizer:
    """Return the tokenizer for prompts of `template`: `tokenizer` itself, unless there is a system message.

    Raises UserError if there is one and the tokenizer in `model_dir` does not support it.
    """
    if not template.system:
        return tokenizer
    plain = load_chat_template(model_dir, read_json_object(model_dir / "tokenizer_config.json"), day)
    if plain is None:
        raise UserError(
            f"template {template.name!r} has a system message and the tokenizer has no chat template",
            why="only the chat template of an instruct model can format a system message",
            todo="set rollout.episode.template to one for base models (research_base), or use an instruct model",
        )
    spec = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    return TrajectoryTokenizer(spec, eos_ids=tokenizer.eos_ids, chat=SystemChatTemplate(plain, template.system))
