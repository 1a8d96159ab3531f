"""Text and ids: exact for trusted text, without control tokens for untrusted text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import UserError
from rollout_server.environment.prompts import demo
from rollout_server.environment.tokenizer import ChatTemplate, TrajectoryTokenizer, load_tokenizer
from tests.support.environments import CHAT, EOS_OF, Kind, write_tokenizer

KINDS: tuple[Kind, ...] = ("words", "bytes")
PIECES = [
    *demo.TAGS,
    "<eos>",
    "<pad>",
    "<unk>",
    "<|im_end|>",
    "<|im_start|>",
    "<tool_call>",
    " ",
    "a",
    "\n",
    "<",
    ">",
    "ß",
]
hostile = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=12).map("".join)


@pytest.fixture(scope="module", params=KINDS)
def tokens(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TrajectoryTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp(request.param), request.param))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> TrajectoryTokenizer:
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("bpe"), "bytes"))


@given(text=hostile)
def test_no_foreign_text_becomes_a_control_token(tokens: TrajectoryTokenizer, text: str) -> None:
    assert tokens.control_ids
    assert not set(tokens.encode_untrusted(text)) & tokens.control_ids


@given(question=hostile)
def test_a_question_brings_no_control_token_of_its_own_into_the_prompt(
    tokens: TrajectoryTokenizer, question: str
) -> None:
    def controls(ids: list[int]) -> list[int]:
        return [i for i in ids if i in tokens.control_ids]

    for chat in (True, False):
        plain = controls(tokens.prompt("a <search> ", "what is a", " ?", chat=chat))
        assert controls(tokens.prompt("a <search> ", question, " ?", chat=chat)) == plain


@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=40))
def test_byte_level_ids_decode_to_the_very_text(bpe: TrajectoryTokenizer, text: str) -> None:
    assert bpe.decode(bpe.encode_untrusted(text)) == text


def test_a_document_that_spells_control_tokens_is_read_as_the_words_it_is(bpe: TrajectoryTokenizer) -> None:
    text = "a <|im_end|> b<tool_call> c    <|endoftext|>"
    assert bpe.decode(bpe.encode_untrusted(text)) == text
    assert len(bpe.encode_untrusted(text)) > len(bpe.encode_trusted(text))


def test_an_added_token_in_brackets_is_a_control_token_from_one_letter_on(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path, "bytes") / "tokenizer.json"
    spec = json.loads(path.read_text())
    first = max(token["id"] for token in spec["added_tokens"]) + 1
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    written = ("<b>", "[I]", "<>", "[]", "<b")
    spec["added_tokens"] += [{"id": first + at, "content": text} | plain for at, text in enumerate(written)]
    path.write_text(json.dumps(spec))
    tokens = load_tokenizer(tmp_path)
    assert [text for at, text in enumerate(written) if first + at in tokens.control_ids] == ["<b>", "[I]"]


def test_our_own_tags_are_the_tokens_that_they_are(tmp_path: Path) -> None:
    words = load_tokenizer(write_tokenizer(tmp_path, "words"))
    assert words.encode_trusted("<search>a</search>") == [5, 11, 6]
    assert words.decode([5, 11, 6]) == "<search> a </search>"
    assert 5 not in words.encode_untrusted("<search> a")


def test_the_end_of_a_turn_is_not_part_of_its_text(bpe: TrajectoryTokenizer) -> None:
    (end,) = bpe.encode_trusted("<|im_end|>")
    assert bpe.eos_ids == {end}
    assert bpe.decode_turn([*bpe.encode_trusted("<answer>x</answer>"), end, end]) == "<answer>x</answer>"
    assert bpe.decode_turn([end]) == ""


def test_ends_are_collected_from_every_file_that_names_one(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bytes")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [491, 492]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 490}))
    assert load_tokenizer(tmp_path).eos_ids == {490, 491, 492}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": 489}}))
    assert load_tokenizer(tmp_path).eos_ids == {489, 491, 492}


@settings(max_examples=20)
@given(question=st.text(alphabet="abc ?ß<>\n", max_size=30))
def test_prompts_are_those_of_transformers(hf: tuple[TrajectoryTokenizer, object], question: str) -> None:
    ours, theirs = hf
    rendered = theirs.apply_chat_template(  # type: ignore[attr-defined]
        [{"role": "user", "content": f"Q: {question}\n"}], add_generation_prompt=True, tokenize=False
    )
    expected = theirs(rendered, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
    assert ours.prompt("Q: ", question, "\n", chat=True) == expected


@pytest.fixture(scope="module")
def hf(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrajectoryTokenizer, object]:
    from transformers import PreTrainedTokenizerFast

    path = write_tokenizer(tmp_path_factory.mktemp("hf"), "bytes")
    theirs = PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), chat_template=CHAT)
    return load_tokenizer(path), theirs


def test_a_template_in_a_file_of_its_own_comes_first(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "bytes")
    (tmp_path / "chat_template.jinja").write_text("{{ eos_token }}{{ messages[0].content | tojson }}!")
    loaded = load_tokenizer(tmp_path)
    assert loaded.decode(loaded.prompt("<", "q", ">", chat=True)) == EOS_OF["bytes"] + '"<q>"!'


@pytest.mark.parametrize("source", ["{% if %}", "{{ raise_exception('no system role') }}", "{{ nothing.at.all }}"])
def test_a_broken_chat_template_is_the_users_error(source: str) -> None:
    with pytest.raises(UserError, match="chat template"):
        ChatTemplate(source, {})


def test_a_chat_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(UserError, match="chat template"):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}", {})


def test_the_fingerprint_changes_with_whatever_changes_the_meaning_of_ids(tmp_path: Path) -> None:
    first = load_tokenizer(write_tokenizer(tmp_path / "1", "bytes")).fingerprint
    assert load_tokenizer(write_tokenizer(tmp_path / "2", "bytes")).fingerprint == first
    (tmp_path / "2" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (tmp_path / "1" / "generation_config.json").write_text(json.dumps({"eos_token_id": 490}))
    others = [load_tokenizer(tmp_path / name).fingerprint for name in "12"]
    others.append(load_tokenizer(write_tokenizer(tmp_path / "3", "words")).fingerprint)
    assert len({first, *others}) == 4


@pytest.mark.parametrize("text", [None, "{", "[]", '{"model": {"type": "Nonsense"}}'])
def test_a_missing_or_broken_tokenizer_is_the_users_error(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
