"""Compare transformers' AutoTokenizer for a model directory with its tokenizer.json, which Foray uses.

AutoTokenizer may rebuild a tokenizer as the class that it has registered for the architecture: for `qwen2` in 5.12 a
byte-level BPE with Qwen's rules, whatever tokenizer.json contains.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protocol.runtime.files import read_json_object

TEXTS, LENGTH = 1000, 16
"""Number of texts, and of tokens in each: drawn from the vocabulary, so that no data is needed."""

USE_AS_IS: Mapping[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "auto_map": {"AutoTokenizer": [None, "tokenization.FileTokenizer"]},
}
"""Fields of tokenizer_config.json with which AutoTokenizer uses tokenizer.json as it is. For some architectures (qwen2,
phi3) transformers ignores the class, unless there is code for another, which it runs only with trust_remote_code."""

# A subclass, because transformers marks the class that it loads from code: its own would stay marked in the process.
CODE = '''from transformers import PreTrainedTokenizerFast


class FileTokenizer(PreTrainedTokenizerFast):
    """Use tokenizer.json as it is."""
'''


def write_tokenizer_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write tokenizer_config.json and, if the `auto_map` of USE_AS_IS is in it, the module that it names."""
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    if config.get("auto_map") == USE_AS_IS["auto_map"]:
        (folder / "tokenization.py").write_text(CODE, encoding="utf-8")


def different_texts(folder: Path) -> int | None:
    """Return for how many of TEXTS texts AutoTokenizer gives other ids than tokenizer.json; TEXTS if it fails.

    None: there is no valid tokenizer.json.
    """
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    try:
        ours = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception:  # the tokenizers library raises plain Exception
        return None
    draw, size = random.Random(0), ours.get_vocab_size()
    texts = [ours.decode([draw.randrange(size) for _ in range(LENGTH)]) for _ in range(TEXTS)]
    try:
        auto = AutoTokenizer.from_pretrained(folder)
        theirs = auto(texts, add_special_tokens=False)["input_ids"]
    except Exception:  # transformers raises anything for files that it does not expect
        return TEXTS
    expected = ours.encode_batch(texts, add_special_tokens=False)
    return sum(bool(ids != right.ids) for ids, right in zip(theirs, expected, strict=True))


def make_auto_load_it(folder: Path) -> int | None:
    """Rewrite tokenizer_config.json, if necessary, so that AutoTokenizer uses tokenizer.json as it is.

    Returns for how many texts the ids still differ, as `different_texts`.
    """
    if not (differ := different_texts(folder)):
        return differ
    config = read_json_object(folder / "tokenizer_config.json")
    for name, value in USE_AS_IS.items():
        config[name] = value
        write_tokenizer_config(folder, config)
        if not (differ := different_texts(folder)):
            break
    return differ
