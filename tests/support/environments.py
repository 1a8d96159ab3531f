"""Tiny tokenizers and episodes made on the spot, for tests and benchmarks: no model hub, no files in the repository.

`words`  one token a word, protocol tags as single added tokens that are not special, no chat template (the demo's kind)
`bytes`  byte-level BPE with control tokens and a chat template; the protocol's tags are several tokens (Qwen's kind)
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rollout_server.environment.config import EnvironmentSettings
from rollout_server.environment.environment import Environment, build_environment
from rollout_server.environment.prompts import demo, search_r1

Kind = Literal["words", "bytes"]
TEMPLATE_OF: dict[Kind, str] = {"words": "demo", "bytes": "search_r1"}
EOS_OF: dict[Kind, str] = {"words": "<eos>", "bytes": "<|im_end|>"}
WORDS = "a b c d e f g h ( ) : ? . question nothing was found my action invalid i need to search or answer think"
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tokenizer(directory: Path, kind: Kind, *, more_words: Sequence[str] = ()) -> Path:
    """Write the tokenizer's files in Hugging Face layout; returns `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(_text(kind, tuple(more_words)), encoding="utf-8")
    config: dict[str, Any] = {"eos_token": EOS_OF[kind]} | ({"chat_template": CHAT} if kind == "bytes" else {})
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@cache
def _text(kind: Kind, more_words: tuple[str, ...]) -> str:
    tokenizer = _words(more_words) if kind == "words" else _bytes()
    return str(tokenizer.to_str(pretty=True))


def make_environment(
    directory: Path, kind: Kind = "words", *, more_words: Sequence[str] = (), **settings: Any
) -> Environment:
    """An environment with a tokenizer of `kind` and the template for it; `settings` override EnvironmentSettings."""
    write_tokenizer(directory, kind, more_words=more_words)
    return build_environment(EnvironmentSettings.model_validate({"template": TEMPLATE_OF[kind]} | settings), directory)


def _words(more_words: Sequence[str]) -> Any:
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    # As in the demo, the vocabulary itself holds the tags and the control tokens: a text can spell them.
    every = ["<pad>", "<eos>", "<unk>", *demo.TAGS, *WORDS.split(), *more_words]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(every))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<pad>", "<eos>", "<unk>")])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in demo.TAGS])
    return tokenizer


def _bytes() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=600, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([search_r1.PROMPT, search_r1.INVALID], trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("    ", special=False)])
    return tokenizer
