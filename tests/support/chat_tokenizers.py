"""Chat templates with a small byte-level BPE that has their control tokens, trained in the test: no model's files.

`play` has a conversation as a gateway has it: a prompt, sampled tokens, tails. The policy says what the template
writes for the same message, so the joined text must be the template's own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from functools import cache
from typing import Any

from rollout_server.agents.native import NativeRenderer
from rollout_server.agents.renderer import Message, Said, Tool
from rollout_server.environment.tokenizer import ChatTemplate, TrajectoryTokenizer

DAY = date(2026, 1, 31)
_CONTROL = re.compile(
    r"<\|[\w\"]+\|?>|<[\w\"]+\|>|<｜[^｜\s]+｜>|\[/?[A-Z_]{3,}\]|\]~!b\[|\]~b\]|\[e~\[|\[gMASK\]|<sop>|</?(?:think|tool_call)>"
    r"|<(?:bos|eos|end_of_turn|start_of_turn|s)>|</s>|<seed:\w+>"
)
"""What published templates write as single tokens."""
TOOLS: list[Tool] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find passages.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to find."},
                    "k": {"type": "integer", "description": "How many."},
                },
                "required": ["query"],
            },
        },
    }
]


@dataclass(frozen=True)
class Chat:
    """A template with its tokenizer. `ends`: the tokens that end a turn."""

    template: ChatTemplate
    tokens: TrajectoryTokenizer
    renderer: NativeRenderer
    ends: Sequence[str]

    def text(self, messages: Sequence[Message], begin: bool) -> str:
        """What the template writes."""
        return self.template.render_messages(messages, begin, {"tools": TOOLS, "xml_tools": TOOLS})

    def controls(self, ids: Sequence[int]) -> list[int]:
        return [i for i in ids if i in self.tokens.control_ids]


def make_chat(source: str, ends: Sequence[str], special: Mapping[str, str] | None = None) -> Chat:
    """A template whose turns end with one of `ends`."""
    names = special or {"bos_token": "<s>", "eos_token": ends[0]}
    controls = sorted({*_CONTROL.findall(source), *names.values(), *ends})
    spec = json.loads(_trained(tuple(controls)))
    ids = {token["content"]: token["id"] for token in spec["added_tokens"]}
    template = ChatTemplate(source, names, DAY)
    tokens = TrajectoryTokenizer(spec, eos_ids=[ids[end] for end in ends], chat=template)
    return Chat(template, tokens, NativeRenderer(tokens, template), ends)


@cache
def _trained(controls: tuple[str, ...]) -> str:
    from tokenizers import AddedToken, Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    tokenizer: Any = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(vocab_size=400, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["You may call the function search with the arguments query and k."] * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in controls])
    return str(tokenizer.to_str())


def assistant(content: str = "", query: str = "", thoughts: str = "") -> dict[str, Any]:
    """A turn of the policy, as templates expect it."""
    turn: dict[str, Any] = {"role": "assistant", "content": content}
    turn |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thoughts) if thoughts else {}
    function = {"name": "search", "arguments": {"query": query, "k": 3}}
    call = {"id": "aBcDeF123", "type": "function", "function": function}
    return turn | ({"tool_calls": [call]} if query else {})


class Conversation:
    """A conversation in tokens and in messages; after each step both are compared."""

    def __init__(self, chat: Chat, *messages: Message) -> None:
        self.chat, self.messages = chat, [*messages]
        self.ids = chat.renderer.begin(messages, TOOLS)
        self._compare()

    def step(self, turn: dict[str, Any], *new: dict[str, Any]) -> Said:
        """The policy says `turn`, and `new` follows. Raises NotAppendable."""
        chat, before = self.chat, self.chat.tokens.decode(self.ids)
        alone = chat.text([*self.messages, turn], False)
        if alone.startswith(before):
            end = max(alone.rfind(mark) + len(mark) for mark in chat.ends)
            said = alone[len(before) : end] if end > len(before) else alone[len(before) :]
        else:  # the template rewrites what was said before
            assert not turn.get("tool_calls"), (before[-80:], alone[len(before) - 80 :])
            said = turn["content"] + chat.ends[0]
        last = chat.tokens.encode_trusted(said)
        if last[-1] not in chat.tokens.eos_ids:  # GLM: the token of the next role ends a turn
            following = chat.text([*self.messages, turn, *new], True)[len(alone) :]
            last.append(chat.tokens.encode_trusted(following)[0])
        read = chat.renderer.read(last, TOOLS)
        for call, given in zip(read.calls, turn.get("tool_calls", ()), strict=True):
            assert (call.name, json.loads(call.arguments)) == tuple(given["function"].values())
            given["id"] = call.id
        for message, call in zip((m for m in new if m["role"] == "tool"), read.calls, strict=False):
            message["tool_call_id"] = call.id
        tail = chat.renderer.go_on(new, TOOLS, last, read)
        self.ids += last + tail
        self.messages += [turn, *new]
        self._compare()
        return read

    def _compare(self) -> None:
        assert self.chat.tokens.decode(self.ids) == self.chat.text(self.messages, True)
