"""The demo's tokenizer: one token a word, the protocol's tags single tokens, saved in Hugging Face layout.

A text is split at blanks, so tokens of a prompt, of the policy and of an observation never merge where they meet. The
tags are added tokens that are *not* special: they are recognised even when glued to a word, and decoding keeps them,
so that an engine finds its stop strings.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from deploy.demo.world import NAME_WORDS, ONE_HOP, RELATION_NAMES, TEXT, TWO_HOP, VERBS
from rollout_server.prompts import demo

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
THOUGHT = "i need to search"
"""What a demonstration thinks before its first search."""
GUESS_THOUGHT = "i know the answer"
"""What a demonstration thinks before it answers without having searched."""


def _words_of(template: str) -> list[str]:
    return [word for word in template.split() if "{" not in word and word not in demo.TAGS]


@cache
def words() -> tuple[str, ...]:
    """Every token in the order of its id: pad, eos, unknown, tags, grammar, names."""
    texts = (demo.PROMPT, demo.PASSAGE, demo.OBSERVATION, demo.EMPTY_RESULT, demo.INVALID, TEXT, ONE_HOP, TWO_HOP)
    grammar = [word for text in (*texts, THOUGHT, GUESS_THOUGHT) for word in _words_of(text)]
    every = (PAD, EOS, UNKNOWN, *demo.TAGS, *grammar, *RELATION_NAMES, *VERBS.values(), *NAME_WORDS)
    return tuple(dict.fromkeys(every))


@cache
def ids_of_words() -> dict[str, int]:
    """Word -> id."""
    return {word: index for index, word in enumerate(words())}


def encode(text: str) -> list[int]:
    """Ids of a text of known words. KeyError for a word that the demo does not know."""
    table = ids_of_words()
    return [table[word] for word in text.split()]


def decode(ids: list[int]) -> str:
    """The words, joined by blanks."""
    table = words()
    return " ".join(table[index] for index in ids)


def save_tokenizer(directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` into `directory`."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    tokenizer = Tokenizer(WordLevel(dict(ids_of_words()), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in (PAD, EOS, UNKNOWN)])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in demo.TAGS])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
