"""Prompt templates: every text that the environment puts around a question, an observation and a refusal."""

from __future__ import annotations

from rollout_server.environment.prompts import demo, research, search_r1
from rollout_server.environment.prompts.base import PromptTemplate

TEMPLATES: dict[str, PromptTemplate] = {
    template.name: template for template in (search_r1.TEMPLATE, research.BASE, research.INSTRUCT, demo.TEMPLATE)
}
"""Every prompt template by name. A new one is one file and one entry here."""
