"""A model's fingerprint: the same wherever and however it is stored, another for whatever changes vectors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from protocol.errors import UserError
from retriever.encoder import encoder_identity
from retriever.encoder.config import TransformerEncoderSettings
from retriever.encoder.folder import fingerprint
from tests.support.encoders import sentence_transformers_layout, tiny_model


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_model(tmp_path_factory.mktemp("models") / "e5-original")
    return sentence_transformers_layout(folder, {"pooling_mode_mean_tokens": True}, dense=8)


@pytest.fixture
def copy(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "copy"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def test_a_copy_elsewhere_is_the_same_model(original: Path, copy: Path) -> None:
    assert fingerprint(copy) == fingerprint(original)
    assert len(fingerprint(original)) == 16


def test_how_a_model_is_stored_does_not_matter(original: Path, copy: Path) -> None:
    state = load_file(copy / "model.safetensors")
    names = sorted(state)
    save_file({n: state[n] for n in names[:5]}, copy / "model-00001-of-00002.safetensors", {"format": "pt"})
    save_file({n: state[n] for n in names[5:]}, copy / "model-00002-of-00002.safetensors")
    (copy / "model.safetensors").unlink()
    edit(copy / "config.json", transformers_version="9.9.9", _name_or_path="elsewhere", dtype="float16")
    edit(copy / "tokenizer.json", truncation={"max_length": 9}, padding=None)
    (copy / "README.md").write_text("a model")
    assert fingerprint(copy) == fingerprint(original)


@pytest.mark.parametrize("file", ["model.safetensors", "2_Dense/model.safetensors"])
def test_other_weights_are_another_model(original: Path, copy: Path, file: str) -> None:
    state = load_file(copy / file)
    for name in state:
        changed = dict(state)
        changed[name] = state[name] + 1e-3
        save_file(changed, copy / file)
        assert fingerprint(copy) != fingerprint(original)


def test_a_changed_configuration_or_tokenizer_is_another_model(original: Path, copy: Path) -> None:
    for file, key in (("config.json", "hidden_act"), ("tokenizer.json", "normalizer"), ("modules.json", None)):
        before = (copy / file).read_text()
        if key:
            edit(copy / file, **{key: "other"})
        else:
            (copy / file).write_text("[]")
        assert fingerprint(copy) != fingerprint(original)
        (copy / file).write_text(before)
    assert fingerprint(copy) == fingerprint(original)


def test_weights_in_torchs_own_format_are_read_in_full(copy: Path) -> None:
    for path in copy.rglob("*.safetensors"):
        path.unlink()
    (copy / "pytorch_model.bin").write_bytes(b"one")
    one = fingerprint(copy)
    (copy / "pytorch_model.bin").write_bytes(b"other")
    assert fingerprint(copy) != one


def test_a_folder_without_weights_or_with_broken_ones_is_refused(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(UserError, match="not a safetensors file"):
        fingerprint(copy)
    for path in copy.rglob("*.safetensors"):
        path.unlink()
    with pytest.raises(UserError, match="no weights"):
        fingerprint(copy)


def test_identity_holds_what_decides_vectors_and_not_where_or_how_they_are_computed(original: Path, copy: Path) -> None:
    def identity(model: Path, **fields: object) -> dict[str, object]:
        return encoder_identity(TransformerEncoderSettings.model_validate({"model": model, "family": "e5", **fields}))

    base = identity(original)
    assert identity(copy, device="cpu", dtype="bfloat16") == base
    # what is written out and equals what is found makes no difference
    assert identity(original, query_prefix="query: ", pooling="mean") == base
    assert identity(original, family="plain", query_prefix="query: ", passage_prefix="passage: ") == base
    for other in ({"query_prefix": ""}, {"passage_prefix": "p: "}, {"max_passage_tokens": 9}, {"family": "plain"}):
        assert identity(original, **other) != base
