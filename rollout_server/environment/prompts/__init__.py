"""Prompt templates: the texts around questions and observations, and the hint after an invalid action."""

from __future__ import annotations

from rollout_server.environment.prompts import demo, research, search_r1
from rollout_server.environment.prompts.base import PromptTemplate

TEMPLATES: dict[str, PromptTemplate] = {
    template.name: template
    for template in (search_r1.TEMPLATE, search_r1.FAST, research.BASE, research.INSTRUCT, demo.TEMPLATE)
}
"""Prompt templates by name. A new one is one file and one entry here."""
