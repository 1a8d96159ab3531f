"""Demonstrations as token ids and a mask of the policy's tokens: three formats, told apart by the first record.

    {"messages": [{"role", "content"}, ..]}                      the model's chat template; trains assistant turns
    {"prompt", "completion"}                                     texts, or lists of messages; trains the completion
    {"question", "segments": [{"text", "train"} | {"passages"}]}  a trajectory: the run's prompt and observations

Parts are encoded apart, as in a rollout, where the policy's tokens are sampled after ids that are fixed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from learner.sft.batches import SftExample
from protocol.errors import UserError
from protocol.runtime.files import read_json_object
from protocol.runtime.records import Record, RecordKind, RecordReader
from protocol.search import Passage
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.environment.environment import Environment, build_environment
from rollout_server.environment.tokenizer import ChatTemplate, load_chat_template, load_tokenizer

DEMONSTRATIONS = RecordKind(
    "demonstration", "file of demonstrations", 'give a file of lines {"messages"}, {"prompt", "completion"} or '
    '{"question", "segments"} (docs/sft.md)'
)  # fmt: skip


class DoesNotFit(Exception):
    """A conversation is longer than the limits allow. The text says which."""


@dataclass
class Tokens:
    """Ids of a conversation so far, and which of them are trained."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    def add(self, ids: Sequence[int], *, train: bool) -> None:
        """Append ids."""
        self.ids += ids
        self.mask += [train] * len(ids)


class DemonstrationEncoder:
    """Encodes records for one model, with the template and limits of trajectories in `settings`.

    day  date for chat templates that contain one (`run.date`)
    """

    def __init__(self, model: Path, settings: EnvironmentSettings, *, max_tokens: int, day: date | None = None) -> None:
        self._model, self._settings, self._max_tokens, self._day = model, settings, max_tokens, day
        self._tokenizer = load_tokenizer(model, day)

    @cached_property
    def environment(self) -> Environment:
        """Build the environment of the trajectories."""
        return build_environment(self._settings, self._model, day=self._day)

    @cached_property
    def _config(self) -> Mapping[str, Any]:
        return read_json_object(self._model / "tokenizer_config.json")

    @cached_property
    def _chat(self) -> ChatTemplate:
        chat = load_chat_template(self._model, self._config, self._day)
        if chat is None:
            raise UserError(
                f"the tokenizer in {self._model} has no chat template",
                why="lists of messages are formatted with it",
                todo='use the model\'s instruct version, or give {"prompt", "completion"} as texts',
            )
        return chat

    @cached_property
    def _end(self) -> list[int]:
        """The token that ends a completion: the tokenizer's `eos_token`; none if it has none."""
        name = self._config.get("eos_token")
        spelling = name.get("content") if isinstance(name, Mapping) else name
        ids = self._tokenizer.encode_trusted(spelling) if spelling else sorted(self._tokenizer.eos_ids)[:1]
        return ids if len(ids) == 1 else []

    def encode(self, encode: EncodeRecord, record: Record) -> SftExample:
        """Return the conversation of a record. Raises ValueError for a record of another format, and DoesNotFit."""
        tokens, key = encode(self, record)
        if len(tokens.ids) > self._max_tokens:
            raise DoesNotFit("longer than sft.max_tokens")
        example = SftExample.of(tokens.ids, tokens.mask, key)
        if not len(example.trained):
            raise ValueError("it has no token to train on")
        return example

    def messages(self, record: Record) -> tuple[Tokens, str]:
        """Return the tokens of `messages`, and the first message of the user."""
        messages = _messages(record, "messages")
        return self._rendered(messages, 0, record.get("tools")), _asked(messages)

    def completion(self, record: Record) -> tuple[Tokens, str]:
        """Return the tokens of `prompt` and `completion`, and what was asked."""
        prompt, completion = record.get("prompt"), record.get("completion")
        if isinstance(prompt, list) and isinstance(completion, list):
            before = _messages(record, "prompt")
            messages = [*before, *_messages(record, "completion")]
            return self._rendered(messages, len(before), record.get("tools")), _asked(messages)
        if not isinstance(prompt, str) or not isinstance(completion, str) or not completion:
            raise ValueError("`prompt` and `completion` must be two texts, or two lists of messages")
        tokens = Tokens()
        tokens.add(self._tokenizer.prompt(prompt, "", "", chat=False), train=False)
        tokens.add([*self._tokenizer.encode_trusted(completion), *self._end], train=True)
        return tokens, prompt

    def trajectory(self, record: Record) -> tuple[Tokens, str]:
        """Return the tokens of `question` and `segments`, as a rollout has them, and the question."""
        question, segments = record.get("question"), record.get("segments")
        if not isinstance(question, str) or not question.strip():
            raise ValueError("no `question`")
        if not isinstance(segments, list) or not segments:
            raise ValueError("`segments` is not a list with at least one segment")
        environment, limits = self.environment, self._settings
        tokens, observations = Tokens(), 0
        tokens.add(environment.prompt(question), train=False)
        for number, segment in enumerate(segments, 1):
            remaining = limits.max_context - len(tokens.ids)
            if (passages := _passages(segment, number)) is not None:
                observations += 1
                limit = min(remaining - limits.reserve_tokens, limits.max_obs_tokens)
                if limit < environment.min_observation_tokens:
                    raise DoesNotFit("longer than rollout.episode.max_context")
                tokens.add(environment.observation(passages, limit), train=False)
                continue
            text, train = _text(segment, number)
            ids = environment.tokenizer.encode_trusted(text)
            if len(ids) > remaining:
                raise DoesNotFit("longer than rollout.episode.max_context")
            if train and len(ids) > limits.max_new_tokens:
                raise DoesNotFit("a turn is longer than rollout.episode.max_new_tokens")
            tokens.add(ids, train=train)
        if observations > limits.max_turns:
            raise DoesNotFit("more searches than rollout.episode.max_turns")
        return tokens, question

    def _rendered(self, messages: Sequence[Mapping[str, Any]], first: int, tools: Any) -> Tokens:
        """Return the chat template's tokens up to the last turn of the assistant; trained: its turns from `first` on.

        A turn is trained up to its end-of-sequence token: what the template writes after it, the policy never samples.
        """
        tokens, done = Tokens(), ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._chat.render_messages(messages[:number], True, {"tools": tools})
            after = self._chat.render_messages(messages[: number + 1], False, {"tools": tools})
            if not before.startswith(done) or not after.startswith(before):
                raise ValueError(
                    f"the chat template writes earlier turns differently before message {number + 1}: give one "
                    "record for each turn of the assistant, as lists `prompt` and `completion`"
                )
            tokens.add(self._tokenizer.encode_trusted(before[len(done) :]), train=False)
            ids, done = self._tokenizer.encode_trusted(after[len(before) :]), after
            ends = [place for place, i in enumerate(ids, 1) if i in self._tokenizer.eos_ids] or [len(ids)]
            tokens.add(ids[: ends[-1]], train=number >= first)
            tokens.add(ids[ends[-1] :], train=False)
        return tokens


EncodeRecord = Callable[[DemonstrationEncoder, Record], tuple[Tokens, str]]
FORMATS: dict[tuple[str, ...], EncodeRecord] = {
    ("messages",): DemonstrationEncoder.messages,
    ("prompt", "completion"): DemonstrationEncoder.completion,
    ("question", "segments"): DemonstrationEncoder.trajectory,
}
"""Fields of a record -> how it is encoded."""


def encode_files(
    paths: Sequence[Path], encoder: DemonstrationEncoder, progress: Callable[[int], None]
) -> tuple[list[SftExample], Counter[str]]:
    """Return the conversations of the files in order, and how many were left out, by reason.

    progress  called with the number of conversations so far
    Raises UserError that names file and line of an invalid record.
    """
    found: list[SftExample] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        encode: EncodeRecord | None = None
        reader = RecordReader(path, DEMONSTRATIONS)
        for number, record in reader:
            encode = encode or _format_of(record, path)
            try:
                found.append(encoder.encode(encode, record))
            except DoesNotFit as reason:
                left_out[str(reason)] += 1
            except (ValueError, UserError) as error:
                if isinstance(error, UserError) and "chat template" not in error.what:
                    raise
                raise UserError(
                    f"{reader.unit} {number} of {path} is not a valid demonstration",
                    why=" ".join(str(error).split()),
                    todo="correct or remove it; the formats are in docs/sft.md",
                ) from None
            progress(len(found))
    if not found:
        why = "; ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise UserError("there is no demonstration to train on", why=why or "the files are empty")
    return found, left_out


def _format_of(record: Record, path: Path) -> EncodeRecord:
    for fields, encode in FORMATS.items():
        if all(name in record for name in fields):
            return encode
    raise UserError(
        f"unknown format of demonstrations: {path}",
        why=f"its first record has {', '.join(sorted(map(str, record)))}",
        todo=DEMONSTRATIONS.todo,
    )


def _messages(record: Record, name: str) -> list[Mapping[str, Any]]:
    """Return the messages in a field. Raises ValueError."""
    messages = record.get(name)
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"`{name}` is not a list with at least one message")
    for number, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {number} of `{name}` has no `role`")
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            raise ValueError(f"message {number} of `{name}` has no `content`")
    return messages


def _asked(messages: Sequence[Mapping[str, Any]]) -> str:
    """Return the first message of the user."""
    return next((str(message.get("content")) for message in messages if message["role"] == "user"), "")


def _passages(segment: Any, number: int) -> list[Passage] | None:
    """Return the passages of an observation, None for a text. Raises ValueError."""
    if not isinstance(segment, Mapping):
        raise ValueError(f"segment {number} is not an object")
    if "passages" not in segment:
        return None
    try:
        return [Passage.model_validate(passage) for passage in segment["passages"]]
    except (ValidationError, TypeError):
        raise ValueError(f'`passages` of segment {number} is not a list of {{"id", "contents"}}') from None


def _text(segment: Mapping[str, Any], number: int) -> tuple[str, bool]:
    text, train = segment.get("text"), segment.get("train")
    if not isinstance(text, str) or not isinstance(train, bool):
        raise ValueError(f"segment {number} has neither `passages` nor `text` and `train` (true or false)")
    return text, train
