"""Prompt templates: every text that the environment puts around a question, an observation and a refusal."""

from __future__ import annotations

from rollout_server.environment.prompts import demo as demo_template
from rollout_server.environment.prompts import research, search_r1
from rollout_server.environment.prompts.base import PromptTemplate

# Every prompt template by name. A new one is one file and one line here.

TEMPLATES: dict[str, PromptTemplate] = {
    search_r1.TEMPLATE.name: search_r1.TEMPLATE,
    research.BASE.name: research.BASE,
    research.INSTRUCT.name: research.INSTRUCT,
    demo_template.TEMPLATE.name: demo_template.TEMPLATE,
}
