"""Exports load in transformers' AutoTokenizer with the ids of tokenizer.json."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foray.demo.world import save_tokenizer
from learner.model.tokenizer_check import TEXTS, different_texts, make_auto_load_it


@pytest.fixture(autouse=True)
def modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep transformers' copies of the code that it runs out of the home directory."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
    monkeypatch.setattr("sys.path", list(sys.path))


def assert_right_ids(folder: Path) -> None:
    """Compare the ids of AutoTokenizer with those of tokenizer.json, whether or not it may run the folder's code."""
    ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = ours.decode(list(range(20)))
    for trusted in (None, False, True):
        auto = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
        assert auto.encode(text, add_special_tokens=False) == ours.encode(text, add_special_tokens=False).ids
    assert PreTrainedTokenizerFast._auto_class is None  # or each tokenizer that this process saves gets an auto_map


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "llama"])
def test_auto_tokenizer_gives_the_ids_of_the_file_whatever_the_architecture(architecture: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({f"word{n}": n for n in range(50)} | {"?": 50}, unk_token="?"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": architecture, "vocab_size": 51}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "?", "tokenizer_class": "Qwen2Tokenizer"}))
    assert different_texts(tmp_path) > TEXTS / 2
    assert make_auto_load_it(tmp_path) == different_texts(tmp_path) == 0
    assert_right_ids(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "?"


def test_the_demos_tokenizer_loads_as_it_is_and_a_model_without_one_is_left_alone(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": 400}))
    before = (tmp_path / "tokenizer_config.json").read_bytes()
    assert make_auto_load_it(tmp_path) == 0 and (tmp_path / "tokenizer_config.json").read_bytes() == before
    assert_right_ids(tmp_path)
    assert make_auto_load_it(tmp_path / "nothing") is None
