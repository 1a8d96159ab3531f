"""The prompts of the methods. The procedures are those of the papers that each names; the wording is Foray's.

They are zero-shot, in one user message: the papers' few-shot demonstrations belong to single data sets. The demo's
model knows a hundred words and no instructions, so it has its own prompts in the form of its training.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foray.evaluation.models import ModelPrompt, PromptPiece
from protocol.search import Passage
from rollout_server.environment.actions import AnswerAction, escape_tags, parse
from rollout_server.environment.prompts import demo, search_r1
from rollout_server.environment.prompts.base import PromptTemplate

_HOLE = re.compile(r"\{(question|passages|thoughts)\}")
_FINAL = re.compile(r"\bthe (?:final |correct )?answer(?: to (?:the|this|your) question)? is:?", re.IGNORECASE)
_LABEL = re.compile(r"^\s*(?:final )?answer\s*:\s*", re.IGNORECASE)
_SENTENCE = re.compile(r"(?<=[a-z0-9\"')\]]{2})[.!?][\"')\]]*(?=\s)|\n+")
"""End of a sentence: a line break, or a mark between a word and white space; not that of an initial or of "St."."""


@dataclass(frozen=True)
class Prompts:
    """The prompts of one family of models.

    parts       by name; a method is refused if one that it uses is absent
    chat        wrap the prompt as a user message, if the model has a chat template
    template    format of passages
    stops       strings that end an answer
    tagged      the answer is between the tags of `template`; otherwise it is plain text

    The parts, and where their procedures come from:
    direct      answer from knowledge. Brown et al., Language Models are Few-Shot Learners, arXiv:2005.14165
    cot         reason first. Kojima et al., Large Language Models are Zero-Shot Reasoners, arXiv:2205.11916
    rag         answer from passages. Lewis et al., Retrieval-Augmented Generation, arXiv:2005.11401
    rag_cot     reason over passages. Shao et al., Iter-RetGen, arXiv:2305.15294
    next_step   write the next sentence of the reasoning. Trivedi et al., IRCoT, arXiv:2212.10509
    """

    name: str
    parts: Mapping[str, str]
    chat: bool
    template: PromptTemplate
    stops: tuple[str, ...] = ()
    tagged: bool = False

    def fill(self, part: str, question: str, passages: Sequence[Passage] = (), thoughts: str = "") -> ModelPrompt:
        """Return the prompt `part`, which this family has, for a question."""
        pattern = self.parts[part]
        found = self.template.format_passages(passages) if passages else self.template.empty
        values = {"question": question.strip(), "passages": escape_tags(found), "thoughts": thoughts}
        pieces, at = [], 0
        for hole in _HOLE.finditer(pattern):
            pieces += [PromptPiece(pattern[at : hole.start()], trusted=True), PromptPiece(values[hole[1]])]
            at = hole.end()
        pieces.append(PromptPiece(pattern[at:], trusted=True))
        return ModelPrompt(tuple(piece for piece in pieces if piece.text), chat=self.chat)

    def answer_in(self, text: str) -> str | None:
        """Return the answer in a reply to `direct` or `rag`; None if there is none."""
        if self.tagged:
            action = parse(text + self.stops[0])
            return action.text if isinstance(action, AnswerAction) else None
        return final_answer(text) or _LABEL.sub("", text.strip().partition("\n")[0]).strip() or None


def final_answer(text: str) -> str | None:
    """Return what follows the last "the answer is", up to the end of its sentence; None without one.

    "The answer to the question is" counts too: small models rephrase what the prompt asks for.
    """
    places = list(_FINAL.finditer(text))
    if not places:
        return None
    rest = text[places[-1].end() :].strip() + " "
    return first_sentence(rest)[0].strip().rstrip(".").strip() or None


def first_sentence(text: str) -> tuple[str, str]:
    """Return (the first sentence, with the white space before it, and the rest)."""
    start = len(text) - len(text.lstrip())
    end = _SENTENCE.search(text, start)
    return (text, "") if end is None else (text[: end.end()], text[end.end() :])


_LAST_LINE = 'Then finish with "So the answer is: ANSWER."'

ENGLISH = Prompts(
    name="english",
    parts={
        "direct": (
            "Answer the question from your own knowledge. Give only the answer, no other words.\nQuestion: {question}"
        ),
        "cot": f"Answer the question from your own knowledge. Think step by step. {_LAST_LINE}\nQuestion: {{question}}",
        "rag": (
            "Answer the question with the help of the documents. Give only the answer, no other words.\n"
            "Documents:\n{passages}\nQuestion: {question}"
        ),
        "rag_cot": (
            f"Answer the question with the help of the documents. Think step by step. {_LAST_LINE}\n"
            "Documents:\n{passages}\nQuestion: {question}"
        ),
        "next_step": (
            "Answer the question in several steps. Write only the next sentence of the reasoning, stating one fact "
            'from the documents. When the thoughts so far give the answer, write "So the answer is: ANSWER."\n'
            "Documents:\n{passages}\nQuestion: {question}\nThoughts so far: {thoughts}\nNext sentence:"
        ),
    },
    chat=True,
    template=search_r1.TEMPLATE,
)

_SEARCHED = f"{demo.PROMPT} <search> {{question}} </search>{demo.OBSERVATION}"
DEMO = Prompts(
    name="demo",
    parts={"direct": f"{demo.PROMPT} <answer>", "rag": _SEARCHED, "rag_cot": _SEARCHED},
    chat=False,
    template=demo.TEMPLATE,
    stops=("</answer>",),
    tagged=True,
)
"""The demo's model: `rag` is a first search with the question itself, in the form in which the model searches."""


def prompts_for(template: str) -> Prompts:
    """Return the prompts for models trained with a template of `rollout.episode.template`."""
    return DEMO if template == demo.NAME else ENGLISH
