"""The demo's constants as a template. They live apart, in `demo.py`, because the warm start reads them one by one."""

from __future__ import annotations

from rollout_server.prompts import demo
from rollout_server.prompts.base import PromptTemplate

TEMPLATE = PromptTemplate(
    name=demo.NAME,
    prompt=demo.PROMPT,
    chat=False,
    question_mark=False,
    passage=demo.PASSAGE,
    passage_id="( {id} : {title} ) {text}",
    separator=demo.PASSAGE_SEPARATOR,
    observation=demo.OBSERVATION,
    empty=demo.EMPTY_RESULT,
    # The demo's model has no words for a broken search engine: to it, nothing was found.
    failed=demo.EMPTY_RESULT,
    invalid=demo.INVALID,
    stops=demo.STOPS,
)
