"""Vectors of models against a slow computation written out here: one text at a time, no padding, manual pooling."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from protocol.errors import UserError
from retriever.encoder.base import NotFinite
from retriever.encoder.config import TransformerEncoderSettings
from retriever.encoder.transformer import TransformerEncoder
from tests.support.encoders import sentence_transformers_layout, tiny_model

TEXTS = [
    "radium",
    "Marie Curie discovered radium in Paris.",
    "a b c",
    "one two three four five six seven eight nine ten",
    "",
]
MEAN = {"pooling_mode_mean_tokens": True}
POOLED: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "mean": lambda states, _: states.sum(dim=0) / len(states),
    "cls": lambda states, _: states[0],
    "last": lambda states, _: states[-1],
    "max": lambda states, _: states.max(dim=0).values,
    "pooler": lambda _, output: output.pooler_output[0],
}


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("plain") / "bert")


def slowly(
    folder: Path, texts: list[str], prefix: str, pooling: str, limit: int, kind: str = "BertModel"
) -> np.ndarray:
    """Vectors before Dense and normalisation."""
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in texts:
        tokens = tokenizer(prefix + text, return_tensors="pt", truncation=True, max_length=limit)
        with torch.no_grad():
            output = model(**tokens)
        states = output.last_hidden_state[0] if "last_hidden_state" in output else torch.zeros(1, 1)
        rows.append(POOLED[pooling](states, output))
    return torch.stack(rows).numpy()


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def build(folder: Path, **fields: Any) -> TransformerEncoder:
    chosen = {"model": folder, "device": "cpu", **fields}
    return TransformerEncoder(TransformerEncoderSettings.model_validate(chosen))


@pytest.mark.parametrize("pooling", POOLED)
@pytest.mark.parametrize("normalize", [True, False])
def test_vectors_are_those_of_the_slow_computation(bert: Path, pooling: str, normalize: bool) -> None:
    encoder = build(bert, pooling=pooling, normalize=normalize, query_prefix="ask: ", passage_prefix="tell: ")
    for encode, prefix in ((encoder.encode_queries, "ask: "), (encoder.encode_passages, "tell: ")):
        expected = slowly(bert, TEXTS, prefix, pooling, 64)
        np.testing.assert_allclose(encode(TEXTS), unit(expected) if normalize else expected, rtol=0, atol=5e-6)


def test_long_texts_are_cut_to_their_sides_length(bert: Path) -> None:
    encoder = build(bert, family="e5", max_query_tokens=12, max_passage_tokens=30)
    long = ["the capital of france is paris and much more could be said of it " * 5]
    np.testing.assert_allclose(
        encoder.encode_queries(long), unit(slowly(bert, long, "query: ", "mean", 12)), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(
        encoder.encode_passages(long), unit(slowly(bert, long, "passage: ", "mean", 30)), rtol=0, atol=1e-6
    )


def test_a_sentence_transformers_folder_is_followed_step_by_step(tmp_path: Path) -> None:
    folder = sentence_transformers_layout(
        tiny_model(tmp_path / "any"), {"pooling_mode": "cls"}, dense=8, prompts={"query": "Q: "}
    )
    weights = load_file(folder / "2_Dense" / "model.safetensors")
    pooled = slowly(folder, TEXTS, "Q: ", "cls", 64)
    expected = np.tanh(pooled @ weights["linear.weight"].numpy().T + weights["linear.bias"].numpy())
    encoder = build(folder)
    assert (encoder.dim, encoder.normalized) == (8, True)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), unit(expected), rtol=0, atol=1e-5)


def test_dprs_two_encoders_make_queries_and_passages(tmp_path: Path) -> None:
    kinds = {"context": "DPRContextEncoder", "question": "DPRQuestionEncoder"}
    folders = {name: tiny_model(tmp_path / name, kind, seed=seed) for seed, (name, kind) in enumerate(kinds.items())}  # type: ignore[arg-type]
    encoder = build(folders["context"], query_model=folders["question"])
    assert not encoder.normalized
    for name, encode in (("context", encoder.encode_passages), ("question", encoder.encode_queries)):
        expected = slowly(folders[name], TEXTS, "", "pooler", 64, kinds[name])
        np.testing.assert_allclose(encode(TEXTS), expected, rtol=0, atol=1e-5)


def test_weights_that_are_not_the_models_are_refused_and_never_made_up(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "bert-plain")
    state = load_file(folder / "model.safetensors")
    without_pooler = {name: value for name, value in state.items() if not name.startswith("pooler.")}
    save_file(without_pooler, folder / "model.safetensors", {"format": "pt"})
    expected = unit(slowly(folder, TEXTS, "", "mean", 64))
    np.testing.assert_allclose(build(folder, family="plain").encode_passages(TEXTS), expected, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="do not belong to a BertModel"):
        build(folder, pooling="pooler")
    without_pooler.pop("encoder.layer.1.output.dense.weight")
    save_file(without_pooler, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match="do not belong to a BertModel"):
        build(folder, family="plain")


def test_a_folder_that_cannot_be_loaded_is_refused_in_words(bert: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nothing_known"}')
    with pytest.raises(UserError, match=r"cannot load the (tokenizer|model)"):
        build(tmp_path, family="e5")
    foreign = tiny_model(tmp_path / "foreign")
    auto_map = {"AutoConfig": "org/code--file.Config", "AutoModel": "org/code--file.Model"}
    (foreign / "config.json").write_text(json.dumps({"model_type": "new", "auto_map": auto_map}))
    with pytest.raises(UserError, match=r"cannot load the (tokenizer|model)") as caught:
        build(foreign, family="e5")
    assert "trust_remote_code" in caught.value.why
    with pytest.raises(UserError, match="device 'cuda:77' is not available"):
        build(bert, family="e5", device="cuda:77")


def test_a_model_that_gives_no_finite_number_is_refused_by_name(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "e5-broken")
    state = load_file(folder / "model.safetensors")
    letter = transformers.AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("z")
    state["embeddings.word_embeddings.weight"][letter] = torch.inf
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    encoder = build(folder)
    assert np.isfinite(encoder.encode_queries(["a", "b"])).all()
    with pytest.raises(NotFinite, match="1 of 3 texts, the first being 'query: z'"):
        encoder.encode_queries(["a", "z", "b"])


def test_half_precision_differs_by_rounding_only(bert: Path) -> None:
    exact = build(bert, family="e5").encode_passages(TEXTS)
    half = build(bert, family="e5", dtype="bfloat16").encode_passages(TEXTS)
    assert 1e-4 < np.abs(half - exact).max() < 0.05
    assert ((half * exact).sum(axis=1) > 0.995).all()
