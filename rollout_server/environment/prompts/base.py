"""What makes an episode's protocol in words: the prompt, the shape of an observation, the tags, the stop strings.

A template is a value, not code: everything that the policy will ever read besides questions and passages stands in
one dataclass, so that it can be stored beside a checkpoint and compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path

from protocol.errors import UserError
from protocol.search import Passage
from rollout_server.environment.tokenizer import ChatTemplate, TrajectoryTokenizer, load_chat_template


@dataclass(frozen=True)
class PromptTemplate:
    """The texts of one protocol.

    name           what settings and `TrajectoryGroup.template` call it
    prompt         first text, holds `{question}`
    chat           wrap the prompt as ONE user message by the tokenizer's chat template, when it has one
    system         system message before it; a template with one needs a tokenizer with a chat template
    question_mark  append "?" to a question that lacks it
    passage        one passage: `{i}` from 1, `{contents}` (all of it), `{heading}` (title line as it stands),
                   `{title}` (no quotes), `{text}`
    passage_id     the same with the passage's `{id}`, for when a tool takes ids
    separator      between two passages
    observation    answer to a search, holds `{passages}`; what stands around it is the environment's own
    empty          in the place of the passages when the search found none
    failed         in the place of the passages when the search failed and the setting is to say so
    invalid        answer to a turn that neither searched nor answered; "": such a turn ends the trajectory
    stops          strings that end a turn, kept in its tokens
    tools_after    words of `prompt` or `system` behind which the enabled tools' sentences stand; "": before `prompt`
    tool_failed    in the place of what a tool brings, when it failed and the setting is to say so
    boxed          the answer is what the last \\boxed{} between the answer's tags holds, and without one there is none
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
        """The question as it stands in the prompt."""
        text = question.strip()
        return text + "?" if self.question_mark and not text.endswith("?") else text

    @property
    def prompt_frame(self) -> tuple[str, str]:
        """What stands before and after the question."""
        before, _, after = self.prompt.partition("{question}")
        return before, after

    @property
    def observation_frame(self) -> tuple[str, str]:
        """What stands before and after the passages of an observation, tags included."""
        before, _, after = self.observation.partition("{passages}")
        return before, after

    def format_passages(self, passages: Sequence[Passage]) -> str:
        """The passages in order, as they come from the index: nothing is escaped here."""
        shown = (
            self.passage.format(
                i=i, id=p.id, contents=p.contents, title=p.title, heading=p.contents.partition("\n")[0], text=p.text
            )
            for i, p in enumerate(passages, 1)
        )
        return self.separator.join(shown).strip()

    def with_tools(self, tools: Sequence[tuple[str, str]], *, show_ids: bool) -> PromptTemplate:
        """This template for a policy that has `tools`, (tag, sentence) each; without any it is this template itself.

        The sentences stand behind `tools_after`, the closing tags end a turn, and with `show_ids` passages show theirs.
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
    """A chat template whose conversations begin with `system`. Raises UserError when it takes no system message."""

    def __init__(self, plain: ChatTemplate, system: str) -> None:
        self._system = system
        super().__init__(plain.source, plain._special, plain.day)

    def render(self, message: str) -> str:
        conversation = [{"role": "system", "content": self._system}, {"role": "user", "content": message}]
        return self.render_messages(conversation, True, {})


def tokenizer_for(
    template: PromptTemplate, tokenizer: TrajectoryTokenizer, model_dir: Path, day: date | None = None
) -> TrajectoryTokenizer:
    """What encodes the prompts of `template`: `tokenizer` itself, unless the template has a system message.

    Raises UserError when it has one and the tokenizer in `model_dir` cannot say it.
    """
    if not template.system:
        return tokenizer
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
    return TrajectoryTokenizer(spec, eos_ids=tokenizer.eos_ids, chat=SystemChatTemplate(plain, template.system))
