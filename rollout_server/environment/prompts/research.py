r"""ReSearch's protocol, verbatim, from `src/verl/utils/dataset/template.py` and `vllm_rollout.py` of
Agent-RL/ReSearch at 4bdb872: one template for base models (plain text), one for instruct models (system message).

Differences from Search-R1: results are between <result> tags, the answer is boxed, only </search> stops a turn (the
answer's turn ends with the end-of-sequence token, so the policy learns to write it), and a turn without a search or an
answer ends the trajectory. ReSearch does not limit turns or observations, only the response to 8192 tokens, after a
prompt of at most 512. 32 searches are more than fit:

    max_turns: 32    max_new_tokens: 8192    max_obs_tokens: 8192    max_context: 8704

Two texts are Foray's, because ReSearch has none: for a search that finds nothing, and for one that fails. An empty
query ends the trajectory; ReSearch sends it to the retriever.
"""

from __future__ import annotations

from dataclasses import replace

from rollout_server.environment.prompts.base import PromptTemplate

_TAGS = (
    "The reasoning process and answer are enclosed within <think> </think> and <answer> </answer> tags respectively, "
    "and the search query and result are enclosed within <search> </search> and <result> </result> tags respectively. "
    "For example, <think> This is the reasoning process. </think> <search> search query here </search> "
    "<result> search result here </result> <think> This is the reasoning process. </think> "
    r"<answer> The final answer is \[ \boxed{answer here} \] </answer>. "
    r"In the last part of the answer, the final exact answer is enclosed within \boxed{} with latex format."
)

PROMPT = (
    "A conversation between User and Assistant. The user asks a question, and the assistant solves it. "
    "The assistant first thinks about the reasoning process in the mind and then provides the user with the answer. "
    "During thinking, the assistant can invoke the wikipedia search tool to search for fact information about specific "
    f"topics if needed. {_TAGS} "
    "User: {question}. Assistant:"
)

SYSTEM = (
    "You are a helpful assistant that can solve the given question step by step with the help of the wikipedia search "
    "tool. Given a question, you need to first think about the reasoning process in the mind and then provide the "
    "answer. During thinking, you can invoke the wikipedia search tool to search for fact information about specific "
    f"topics if needed. {_TAGS}"
)

BASE = PromptTemplate(
    name="research_base",
    prompt=PROMPT,
    chat=False,
    question_mark=False,
    passage="{contents}",
    separator="\n\n",
    observation=" <result>\n{passages}\n</result>",
    empty="No results found.",
    failed="The search engine did not respond.",
    invalid="",
    passage_id="{heading} (id: {id})\n{text}",
    tools_after="specific topics if needed. ",
    stops=("</search>",),
    boxed=True,
)

INSTRUCT = replace(BASE, name="research_instruct", prompt="{question}", system=SYSTEM, chat=True)
