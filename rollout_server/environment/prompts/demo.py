"""The demo's template: Search-R1's turn structure in the small vocabulary of the demo's model.

The warm start trains on these texts (`foray.demo.demonstrations` reads these constants), so a change requires a new
warm start. Words are separated by spaces: the demo's tokenizer is word-level.
"""

from __future__ import annotations

from rollout_server.environment.prompts.base import PromptTemplate

NAME = "demo"

PROMPT = "question : {question}"
"""The prompt. The question includes its question mark."""

PASSAGE = "( {title} ) {text}"
"""One passage inside an observation: `title` and `text` of `protocol.search.Passage`."""

PASSAGE_SEPARATOR = " "
"""Separator of passages."""

OBSERVATION = " <information> {passages} </information> "
"""Observation after a search, masked in the loss."""

EMPTY_RESULT = "nothing was found ."
"""Replaces the passages if the search found none."""

INVALID = " my action was invalid . i need to search or to answer . "
"""Observation after a turn without a search or an answer (Search-R1's text, shortened to known words)."""

STOPS = ("</search>", "</answer>")
"""Strings that end a turn, kept in its output."""

TAGS = (
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<information>",
    "</information>",
    "<answer>",
    "</answer>",
)
"""Single tokens of the demo's vocabulary."""


TEMPLATE = PromptTemplate(
    name=NAME,
    prompt=PROMPT,
    chat=False,
    question_mark=False,
    passage=PASSAGE,
    passage_id="( {id} : {title} ) {text}",
    separator=PASSAGE_SEPARATOR,
    observation=OBSERVATION,
    empty=EMPTY_RESULT,
    # The demo's vocabulary has no words for a failed search: show that nothing was found.
    failed=EMPTY_RESULT,
    invalid=INVALID,
    stops=STOPS,
)
