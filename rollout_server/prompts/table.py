"""Every prompt template by name. A new one is one file and one line here."""

from __future__ import annotations

from rollout_server.prompts import demo_template, research, search_r1
from rollout_server.prompts.base import PromptTemplate

TEMPLATES: dict[str, PromptTemplate] = {
    search_r1.TEMPLATE.name: search_r1.TEMPLATE,
    research.BASE.name: research.BASE,
    research.INSTRUCT.name: research.INSTRUCT,
    demo_template.TEMPLATE.name: demo_template.TEMPLATE,
}
