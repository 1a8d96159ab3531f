"""The demo's template: Search-R1's turn structure in the few words that the demo's tiny model knows.

Every text here is part of what the demo's model is warm started on (`deploy.demo.demonstrations` reads these very
constants), so a change here needs a new warm start. Words are separated by blanks: the demo's tokenizer is word level.
"""

from __future__ import annotations

from rollout_server.environment.prompts.base import PromptTemplate

NAME = "demo"

PROMPT = "question : {question}"
"""What the policy is given first. The question brings its question mark."""

PASSAGE = "( {title} ) {text}"
"""One passage inside an observation: `title` and `text` of `protocol.search.Passage`."""

PASSAGE_SEPARATOR = " "
"""Between two passages of one observation."""

OBSERVATION = " <information> {passages} </information> "
"""Answer to a search, written by the environment and masked in the loss."""

EMPTY_RESULT = "nothing was found ."
"""In the place of the passages when the search returned none."""

INVALID = " my action was invalid . i need to search or to answer . "
"""Answer to a turn that ended in neither a search nor an answer (Search-R1's text, shortened to known words)."""

STOPS = ("</search>", "</answer>")
"""A turn of the policy ends with one of these, kept in its output."""

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
    # The demo's model has no words for a broken search engine: to it, nothing was found.
    failed=EMPTY_RESULT,
    invalid=INVALID,
    stops=STOPS,
)
