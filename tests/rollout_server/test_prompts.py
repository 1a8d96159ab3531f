"""Templates say what they must, and every one of the table works."""

from __future__ import annotations

import pytest

from protocol.search import Passage
from protocol.settings import section
from rollout_server.config_episode import EpisodeSettings
from rollout_server.prompts import demo
from rollout_server.prompts.base import PromptTemplate
from rollout_server.prompts.table import TEMPLATES

# `make_prefix` of Search-R1's nq_search.py with a question in it.
SEARCH_R1 = """Answer the given question. \
You must conduct reasoning inside <think> and </think> first every time you get new information. \
After reasoning, if you find you lack some knowledge, you can call a search engine by <search> query </search> and it \
will return the top searched results between <information> and </information>. \
You can search as many times as your want. \
If you find no further external knowledge needed, you can directly provide the answer inside <answer> and </answer>, \
without detailed illustrations. For example, <answer> Beijing </answer>. Question: who wrote emma?\n"""
PASSAGES = (
    Passage(id="1", contents='"Emma"\nA novel.'),
    Passage(id="2", contents='"Jane {0} Austen"\nShe\'s {i}.\nYes.'),
)


def written(template: PromptTemplate, question: str) -> str:
    before, after = template.frame
    return before + template.wording(question) + after


@pytest.mark.parametrize("question", ["who wrote emma", " who wrote emma? "])
def test_search_r1_prompts_word_for_word_and_adds_a_missing_question_mark(question: str) -> None:
    assert written(TEMPLATES["search_r1"], question) == SEARCH_R1


def test_search_r1_lists_passages_as_it_was_trained_with_title_line_and_all() -> None:
    listed = TEMPLATES["search_r1"].list_passages(PASSAGES)
    assert listed == 'Doc 1(Title: "Emma") A novel.\nDoc 2(Title: "Jane {0} Austen") She\'s {i}.\nYes.'
    assert TEMPLATES["search_r1"].around == ("\n\n<information>", "</information>\n\n")


def test_the_demo_template_is_made_of_the_constants_its_warm_start_reads() -> None:
    template = TEMPLATES[demo.NAME]
    assert written(template, "where is a ?") == demo.PROMPT.format(question="where is a ?")
    shown = demo.OBSERVATION.format(passages=demo.PASSAGE_SEPARATOR.join(["( Emma ) A novel."] * 2))
    before, after = template.around
    assert before + template.list_passages([PASSAGES[0]] * 2) + after == shown


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=lambda t: t.name)
def test_every_template_has_its_holes_and_stops_at_both_actions(template: PromptTemplate) -> None:
    assert template.prompt.count("{question}") == 1
    assert template.observation.count("{passages}") == 1
    assert set(template.stops) == {"</search>", "</answer>"}
    assert "e" in template.list_passages(PASSAGES) and template.empty and template.failed and template.invalid


def test_a_misspelt_template_is_refused_with_the_right_name() -> None:
    with pytest.raises(Exception, match="did you mean 'search_r1'"):
        section({"rollout": {"template": "serch_r1"}}, "rollout", EpisodeSettings)
