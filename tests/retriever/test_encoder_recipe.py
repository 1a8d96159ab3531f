"""Prefix, pooling, normalisation, lengths: explicit setting, else the folder, else the table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from protocol.errors import UserError
from retriever.encoder.config import FamilyName, TransformerEncoderSettings
from retriever.encoder.families import FAMILIES, family_of
from retriever.encoder.folder import Recipe, resolve

BGE = "Represent this sentence for searching relevant passages: "
MEAN, CLS = {"pooling_mode_mean_tokens": True}, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}

Model = Callable[..., Path]


@pytest.fixture
def model(tmp_path: Path) -> Model:
    """A folder's JSON files without weights: `model("e5-base", {config}, modules=[..], pooling={..}, said={..})`."""

    def make(
        name: str,
        config: dict[str, Any] | None = None,
        modules: list[str] | None = None,
        pooling: dict[str, Any] = MEAN,
        said: dict[str, Any] | None = None,
        bert: dict[str, Any] | None = None,
    ) -> Path:
        folder = tmp_path / name
        (folder / "1_Pooling").mkdir(parents=True)
        bert_like = {"model_type": "bert", "max_position_embeddings": 512}
        (folder / "config.json").write_text(json.dumps(bert_like | (config or {})))
        if modules is not None:
            steps = [
                {
                    "idx": i,
                    "name": str(i),
                    "path": f"{i}_{step}" if i else "",
                    "type": f"sentence_transformers.models.{step}",
                }
                for i, step in enumerate(modules)
            ]
            (folder / "modules.json").write_text(json.dumps(steps))
            (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        for file, content in (("config_sentence_transformers.json", said), ("sentence_bert_config.json", bert)):
            if content is not None:
                (folder / file).write_text(json.dumps(content))
        return folder

    return make


def recipe(folder: Path, **fields: Any) -> Recipe:
    return resolve(TransformerEncoderSettings(model=folder, **fields))[0]


def test_the_settings_know_the_families_of_the_table() -> None:
    assert set(get_args(FamilyName)) == {"auto", *(family.name for family in FAMILIES)}


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("e5-base-v2", "e5"),
        ("e5-large", "e5"),
        ("multilingual-e5-large", "e5"),
        ("multilingual-e5-large-instruct", "e5_instruct"),
        ("e5-mistral-7b-instruct", "e5_mistral"),
        ("bge-large-en-v1.5", "bge"),
        ("bge-small-zh-v1.5", "bge_zh"),
        ("bge-m3", "bge_m3"),
        ("contriever-msmarco", "contriever"),
        ("mcontriever", "contriever"),
        ("dpr-ctx_encoder-single-nq-base", "dpr"),
        ("gte-base", "gte"),
        ("gte-base-en-v1.5", "gte_cls"),
        ("gte-Qwen2-1.5B-instruct", "gte_qwen"),
        # the substring is no word: Search-R1's server would give all of these e5's prefix
        ("movie5-base", None),
        ("e55", None),
        ("base5", None),
        ("my-encoder", None),
    ],
)
def test_the_name_determines_the_family_by_whole_words(name: str, family: str | None) -> None:
    found = family_of(name)
    assert (found.name if found else None) == family


def test_search_r1s_models_get_search_r1s_treatment(model: Model) -> None:
    e5 = recipe(model("e5-base-v2"))
    assert (e5.query_prefix, e5.passage_prefix, e5.pooling, e5.normalize) == ("query: ", "passage: ", "mean", True)
    assert (e5.max_query, e5.max_passage) == (256, 256)
    bge = recipe(model("bge-base-en-v1.5"))
    assert (bge.query_prefix, bge.passage_prefix, bge.pooling, bge.normalize) == (BGE, "", "cls", True)
    contriever = recipe(model("contriever"))
    assert (contriever.query_prefix, contriever.passage_prefix) == ("", "")
    assert (contriever.pooling, contriever.normalize) == ("mean", False)


def test_a_moved_folder_is_known_by_the_name_in_its_configuration_and_by_its_hub_cache_path(model: Model) -> None:
    assert recipe(model("moved", {"_name_or_path": "intfloat/e5-base-v2"})).family == "e5"
    cached = model("models--intfloat--e5-small/snapshots/0123abcd")
    assert recipe(cached).family == "e5"


def test_an_unknown_model_is_refused_until_configured(model: Model) -> None:
    unknown = model("my-encoder")
    with pytest.raises(UserError, match="cannot determine the encoding of"):
        recipe(unknown)
    assert recipe(unknown, family="bge").pooling == "cls"
    assert recipe(unknown, pooling="last") == recipe(unknown, family="plain", pooling="last")


def test_the_folders_own_words_come_before_the_table(model: Model) -> None:
    folder = model(
        "e5-own",
        modules=["Transformer", "Pooling"],
        pooling=CLS,
        said={"prompts": {"query": "Q: ", "document": "D: "}, "similarity_fn_name": "dot"},
        bert={"max_seq_length": 128},
    )
    found = recipe(folder)
    assert found == Recipe("e5", "Q: ", "D: ", "cls", False, 128, 128)
    # a prefix is the user's to word, and a length may be cut
    asked = recipe(folder, query_prefix="ask: ", passage_prefix="", max_query_tokens=32)
    assert (asked.query_prefix, asked.passage_prefix, asked.max_query, asked.max_passage) == ("ask: ", "", 32, 128)


def test_empty_prompts_and_a_missing_normalize_say_nothing(model: Model) -> None:
    folder = model("e5-silent", modules=["Transformer", "Pooling"], said={"prompts": {"query": "", "document": ""}})
    found = recipe(folder)
    assert (found.query_prefix, found.passage_prefix, found.normalize) == ("query: ", "passage: ", True)


def test_a_default_prompt_is_for_both_sides(model: Model) -> None:
    said = {"prompts": {"any": "text: "}, "default_prompt_name": "any"}
    found = recipe(model("anything", modules=["Transformer", "Pooling", "Normalize"], said=said))
    assert (found.query_prefix, found.passage_prefix) == ("text: ", "text: ")


@pytest.mark.parametrize("pooling", [{"pooling_mode": "lasttoken"}, {"pooling_mode": ["lasttoken"]}])
def test_the_newer_spelling_of_a_pooling_is_read(model: Model, pooling: dict[str, Any]) -> None:
    assert recipe(model("new", modules=["Transformer", "Pooling"], pooling=pooling)).pooling == "last"


def test_an_explicit_setting_that_contradicts_the_folder_is_refused(model: Model) -> None:
    folder = model("any", modules=["Transformer", "Pooling", "Normalize"])
    with pytest.raises(UserError, match="pooling = cls contradicts"):
        recipe(folder, pooling="cls")
    with pytest.raises(UserError, match="normalize = false contradicts"):
        recipe(folder, normalize=False)
    with pytest.raises(UserError, match=r"exceeds the positions of the model in"):
        recipe(folder, max_passage_tokens=513)
    assert recipe(folder, pooling="mean", normalize=True).pooling == "mean"


def test_lengths_stay_within_the_models_positions(model: Model) -> None:
    assert recipe(model("e5-short", {"max_position_embeddings": 40})).max_passage == 40
    for kind in ("xlm-roberta", "mpnet"):
        folder = model(f"e5-{kind}", {"model_type": kind, "max_position_embeddings": 130})
        assert recipe(folder).max_query == 128


def test_half_of_dpr_is_refused(model: Model) -> None:
    context, question = (model(name, {"model_type": "dpr"}) for name in ("context", "question"))
    with pytest.raises(UserError, match="one of DPR's two encoders"):
        recipe(context)
    found = recipe(context, query_model=question)
    assert (found.pooling, found.normalize) == ("pooler", False)


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        (["Transformer", "Pooling", "LayerNorm"], MEAN, "unsupported step 'LayerNorm'"),
        (["Transformer", "Dense", "Pooling"], MEAN, "steps in an unsupported order"),
        (["Transformer", "Pooling"], {"pooling_mode_weightedmean_tokens": True}, "an unsupported pooling"),
        (["Transformer", "Pooling"], MEAN | {"pooling_mode_cls_token": True}, "an unsupported pooling"),
        (["Transformer", "Pooling"], MEAN | {"include_prompt": False}, "an unsupported pooling"),
    ],
)
def test_what_this_encoder_cannot_do_is_refused(
    model: Model, modules: list[str], pooling: dict[str, Any], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        recipe(model("odd", modules=modules, pooling=pooling))


def test_a_missing_folder_and_a_folder_without_a_model_are_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no model found"):
        recipe(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"cannot read .*config\.json"):
        recipe(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        recipe(tmp_path)
