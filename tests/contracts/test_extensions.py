"""An algorithm, a reward, an index, an encoder, an online provider and a tool, each added by one file of fewer than 40
lines and one line in a registry: the examples keep the contracts that the tests beside this one state.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
from pydantic import TypeAdapter

from examples.extensions.algorithm import MedianSettings
from examples.extensions.encoder import PairsSettings
from examples.extensions.index import OverlapSettings
from examples.extensions.provider import MediaWikiSettings
from examples.extensions.reward import NumberSettings
from examples.extensions.tool import CalculatorSettings
from learner import algorithms
from learner.config import algorithm as algorithm_config
from protocol.messages import Question, Status
from protocol.settings import union_of
from retriever import encoder, index
from retriever.backends.web import config as web_config
from retriever.backends.web import providers
from retriever.backends.web.provider import ProviderHit, WebSearchError
from retriever.encoder import config as encoder_config
from retriever.index import config as index_config
from rollout_server import rewards, tools
from rollout_server.rewards.base import RewardInput
from rollout_server.rewards.resources import RewardResources
from rollout_server.tools.base import Tool
from tests.contracts import test_algorithm, test_encoder, test_index, test_tool

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples" / "extensions").glob("*.py"))
REGISTRIES: dict[str, dict[Any, str]] = {
    "algorithm": algorithm_config.REGISTRY,
    "encoder": encoder_config.REGISTRY,
    "index": index_config.REGISTRY,
    "provider": web_config.REGISTRY,
    "reward": rewards.REGISTRY,
    "tool": tools.REGISTRY,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the line that the docstring of each example shows to the registry that it names."""
    for path in FILES:
        said = re.search(r'Its line in `(\S+)`:\s+`(\w+): "([\w.:]+)"', path.read_text())
        assert said and resolve_name(said[1]) is REGISTRIES[path.stem]
        settings = resolve_name(f"examples.extensions.{path.stem}:{said[2]}")
        monkeypatch.setitem(REGISTRIES[path.stem], settings, said[3])


def test_each_is_one_file_of_fewer_than_40_lines() -> None:
    assert {path.stem: len(path.read_text().splitlines()) < 40 for path in FILES} == dict.fromkeys(REGISTRIES, True)


@pytest.mark.parametrize("kind", REGISTRIES)
def test_its_type_selects_it_in_a_configuration(kind: str) -> None:
    settings = list(REGISTRIES[kind])[-1]
    assert settings.__module__ == f"examples.extensions.{kind}"
    selected = TypeAdapter(union_of(REGISTRIES[kind])).validate_python({"type": settings.model_fields["type"].default})
    assert type(selected) is settings


def test_the_algorithm() -> None:
    settings = MedianSettings(kl={"coefficient": 0.1}, entropy_coefficient=0.01)
    algorithm = algorithms.build_algorithm(settings)
    assert algorithm.advantages(test_algorithm.outcomes()).tolist() == [0.5, -0.5, 0, 0, 0, 0.5, -0.5, 0]
    test_algorithm.test_advantages_follow_their_trajectory_in_any_order(settings)
    test_algorithm.test_the_settings_say_whether_groups_of_one_train_on_nothing(settings, "none")
    test_algorithm.test_the_loss_is_a_scalar_with_a_gradient(settings)
    test_algorithm.test_losses_and_metrics_of_parts_add_up(settings)
    test_algorithm.test_a_micro_batch_without_a_token_adds_nothing(settings)


@pytest.mark.parametrize(
    ("answer", "worth"), [("1,000", 1.0), ("1.005e3", 1.0), ("1020", 0.0), ("many", 0.0), (None, 0)]
)
async def test_the_reward(answer: str | None, worth: float) -> None:
    reward: Any = rewards.build_reward(NumberSettings(), RewardResources())
    question = Question(id="q", text="how many?", answers=("1000", "a thousand"))
    assert await reward(RewardInput(question, Status.ANSWERED, answer, (), 0)) == worth
    assert reward.name == NumberSettings().key


def test_the_index(tmp_path: Path) -> None:
    def make(texts: list[str]) -> Any:
        return test_index.made(OverlapSettings(), texts, tmp_path / str(len(list(tmp_path.iterdir()))))

    test_index.test_the_best_hits_are_the_passages_that_answer(make)
    test_index.test_hits_have_the_promised_shapes_and_types(make)
    test_index.test_no_query_gives_no_hits(make)
    test_index.test_more_hits_than_passages_gives_every_passage_once(make, 9)
    test_index.test_hits_come_by_score_and_then_by_row(make, 5)
    test_index.test_equal_passages_come_in_the_order_of_the_corpus(make)
    test_index.test_a_querys_hits_do_not_depend_on_its_batch(make)
    test_index.test_a_corpus_of_one_blank_passage_can_be_searched(make)
    assert index.index_identity(OverlapSettings()) == {"type": "overlap"}


def test_the_encoder() -> None:
    built = encoder.build_encoder(PairsSettings(dim=64))
    test_encoder.test_vectors_have_the_promised_shape_type_and_length(built)
    test_encoder.test_no_texts_give_no_rows(built)
    test_encoder.test_an_empty_text_has_a_finite_vector_and_affects_no_other(built, "hashed")
    test_encoder.test_other_texts_have_other_vectors(built)
    test_encoder.test_a_vector_does_not_depend_on_its_batch_or_place(built, "hashed")
    assert encoder.encoder_identity(PairsSettings(dim=64)) == {"type": "pairs", "dim": 64}


def test_the_provider() -> None:
    provider = providers.build_provider(MediaWikiSettings())
    asked = provider.request("radium", 80)
    assert asked.url == "https://en.wikipedia.org/w/api.php" and not asked.body
    assert (asked.params["srsearch"], asked.params["srlimit"]) == ("radium", "50")
    page = {"title": "Radium", "pageid": 25602, "snippet": '<span class="searchmatch">Radium</span> &amp; more'}
    hit = ProviderHit("Radium", "Radium & more", "https://en.wikipedia.org/w/index.php?curid=25602")
    assert provider.parse({"query": {"search": [page]}}) == [hit]
    assert provider.parse({"query": {"search": []}}) == []
    with pytest.raises(WebSearchError, match="garbage"):
        provider.parse({"error": {"code": "ratelimited"}})


@pytest.fixture
async def calculator(registered: None) -> AsyncIterator[Tool]:
    tool = tools.build_tool(CalculatorSettings(), ())
    yield tool
    await tool.close()


@pytest.mark.parametrize("argument", test_tool.ARGUMENTS, ids=range(len(test_tool.ARGUMENTS)))
async def test_the_tool_answers_anything(calculator: Tool, argument: str) -> None:
    await test_tool.test_any_argument_has_an_outcome_in_bounded_time(calculator, argument)


@pytest.mark.parametrize(("argument", "said"), [(" 2 * (3 + 4) ", "14.0"), ("-1 / 8", "-0.125"), ("7 / 0", "")])
async def test_the_tool(calculator: Tool, argument: str, said: str) -> None:
    result = await calculator(argument)
    assert (result.text, result.mistake) == ((said, "") if said else ("That is no arithmetic.", "no_arithmetic"))
    test_tool.test_its_sentence_names_its_tag_and_fits_every_template(CalculatorSettings)
    await test_tool.test_closing_twice_is_safe_and_a_call_after_it_fails_by_name(calculator)
