"""Search-R1's protocol, verbatim ("as your want" included), from `scripts/data_process/nq_search.py` and
`search_r1/llm_agent/generation.py` of PeterGriffinJin/Search-R1 at a14dc3a.

Two texts are Foray's, because Search-R1 has none: for a search that finds nothing, and for one that fails. Tools add
their sentences and the ids of passages; without tools the prompt is unchanged.
"""

from __future__ import annotations

from dataclasses import replace

from rollout_server.environment.prompts.base import PromptTemplate

PROMPT = (
    "Answer the given question. "
    "You must conduct reasoning inside <think> and </think> first every time you get new information. "
    "After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query </search> "
    "and it will return the top searched results between <information> and </information>. "
    "You can search as many times as your want. "
    "If you find no further external knowledge needed, you can directly provide the answer inside <answer> and "
    "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)

FAST_PROMPT = (
    "Answer the given question. "
    "If you lack some knowledge, you can call a search engine by <search> query </search> "
    "and it will return the top searched results between <information> and </information>. "
    "Use the results directly. "
    "You can search as many times as your want. "
    "If you find no further external knowledge needed, you can directly provide the answer inside <answer> and "
    "</answer>, without detailed illustrations. For example, <answer> Beijing </answer>. Question: {question}\n"
)
"""Search-R1++'s fast template (arXiv 2602.19526) asks for no thinking. Its wording is not public: this is Foray's."""

INVALID = (
    "\nMy previous action is invalid. "
    "If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)

TEMPLATE = PromptTemplate(
    name="search_r1",
    prompt=PROMPT,
    chat=True,
    question_mark=True,
    passage="Doc {i}(Title: {heading}) {text}\n",
    separator="",
    observation="\n\n<information>{passages}</information>\n\n",
    empty="No results found.",
    failed="The search engine did not respond.",
    invalid=INVALID,
    passage_id="Doc {i}(Id: {id} Title: {heading}) {text}\n",
    tools_after="You can search as many times as your want. ",
)
FAST = replace(TEMPLATE, name="search_r1_fast", prompt=FAST_PROMPT)
