"""The end of a turn that several engines wrote, and what it costs to find it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from protocol.messages import Sampling
from rollout_server.engine.base import GenerateRequest
from rollout_server.engine.continuation import StopChecker, StopSearch, TurnAssembler
from rollout_server.engine.decoding import ReceivedTokens
from rollout_server.environment.tokenizer import load_tokenizer
from tests.support.environments import write_tokenizer

STOPS = ("</search>", "</answer>", "an end", ".\n", "🤖>", "é")
PIECES = ("<", "</", "</se", "se", "ar", "ch", "arch>", "h>", "/", ">", "</answer>", "answer", "an", "end", ".", "\n")
PIECES += ("a", "b", "é", "🤖", "🤖>", " ", "  ", " an", " end", "#", "ｘ")

Decode = Callable[[Sequence[int]], str]
End = tuple[int, str | int] | None


def brute_force(decode: Decode, eos: frozenset[int], ids: Sequence[int], stops: Sequence[str]) -> End:
    """The end by decoding every prefix."""
    over = next((k for k, i in enumerate(ids, 1) if i in eos), 0)
    ids = ids[:over] if over else ids
    if any(stop in decode(ids) for stop in stops):
        for k in range(1, len(ids) + 1):
            text = decode(ids[:k])
            for stop in stops:
                if stop in text:
                    return k, stop
    return (over, ids[over - 1]) if over else None


def byte_fallback() -> Any:
    """Llama 2's kind: characters without a token are bytes, and an incomplete one hides its whole run of bytes."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE

    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *(p.replace(" ", "▁") for p in PIECES)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def byte_level() -> Any:
    """Qwen's kind: a token is a run of bytes, which may begin and end within a character."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    bytes_of = [p for piece in PIECES for p, _ in ByteLevel(add_prefix_space=False).pre_tokenize_str(piece)]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys([*ByteLevel.alphabet(), *bytes_of]))}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def word_pieces() -> Any:
    """BERT's kind: tokens are joined by spaces, which the decoder removes before ## and punctuation."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordPiece

    pieces = ["[UNK]", *PIECES, *(f"##{piece}" for piece in PIECES)]
    tokenizer = Tokenizer(WordPiece({p: i for i, p in enumerate(dict.fromkeys(pieces))}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


def joined_words() -> Any:
    """The demo's kind, without a decoder: tokens are joined by spaces."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    return Tokenizer(WordLevel({p: i for i, p in enumerate(dict.fromkeys(["<unk>", *PIECES]))}, unk_token="<unk>"))


@pytest.mark.parametrize("kind", [byte_level, byte_fallback, word_pieces, joined_words])
@pytest.mark.fault(5)
def test_the_end_in_arriving_chunks_is_the_one_that_decoding_every_prefix_finds(kind: Callable[[], Any]) -> None:
    tokenizer, draw = kind(), random.Random(7)
    size = tokenizer.get_vocab_size()

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=False))

    texts = {i: decode([i]).removeprefix("##") for i in range(size)}
    common = [i for i, text in texts.items() if text in PIECES]

    def spelt(stop: str) -> list[int]:
        """A stop string in random tokens; a character without a token is left out."""
        ids = []
        while stop:
            found = [i for i, text in texts.items() if text and stop.startswith(text)]
            ids += [draw.choice(found)] if found else []
            stop = stop[len(texts[ids[-1]]) if found else 1 :]
        return ids

    ends, again = 0, 0
    for _ in range(400):
        eos = frozenset({size - 1} if draw.random() < 0.3 else ())
        checker, stops = StopChecker(decode, eos), draw.sample(STOPS, draw.randint(0, 3))
        rare = draw.choice((0.0, 0.1, 0.5))
        ids: list[int] = []
        while len(ids) < 60:
            if draw.random() < 0.05:
                ids += spelt(draw.choice(STOPS))
            # size is no token: a model may have more rows than its tokenizer, and their text is empty
            ids.append(draw.randint(0, size) if draw.random() < rare else draw.choice(common))
        search, known = StopSearch(checker, stops), 0
        while known < len(ids):
            known = min(len(ids), known + draw.choice((1, 2, 8, 64)))
            if draw.random() < 0.1:  # an engine's last tokens may be dropped, and others follow
                known = draw.randint(1, known)
                assert search.find(ids[:known]) == brute_force(decode, eos, ids[:known], stops)
                ids[known:] = [draw.choice(common) for _ in ids[known:]]
                again += 1
                continue
            expected = brute_force(decode, eos, ids[:known], stops)
            assert search.find(ids[:known]) == expected == search.find(ids[:known]), (stops, ids[:known])
            ends += expected is not None
    assert ends > 100 and again > 100, "both cases were met"


def test_finding_the_end_of_a_turn_decodes_each_of_its_tokens_a_constant_number_of_times(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, "bytes"))
    decoded = 0

    def decode(ids: Sequence[int]) -> str:
        nonlocal decoded
        decoded += len(ids)
        return tokenizer.decode(ids)

    for count in (500, 2000):
        thought = tokenizer.encode_trusted("The film > was made in 1984. </search " * count)[:count]
        turn = [*thought, *tokenizer.encode_trusted("</search>")]
        for begun in (8, len(thought), len(turn)):  # what the first engine wrote; the second one's comes in chunks
            decoded = 0
            search = StopSearch(StopChecker(decode, tokenizer.eos_ids), ("</search>", "</answer>"))
            ends = [search.find(turn[:begun])]
            while begun < len(turn):
                begun = min(len(turn), begun + 8)
                ends.append(search.find(turn[:begun]))
            assert ends[:-1] == [None] * (len(ends) - 1) and ends[-1] == search.find(turn) == (len(turn), "</search>")
            assert decoded <= 8 * len(turn), f"{decoded} for {len(turn)}"


def test_the_end_is_searched_for_only_where_the_engine_may_have_missed_it() -> None:
    def decode(ids: Sequence[int]) -> str:
        decoded.append(list(ids))
        return "".join("abcd"[i] for i in ids)

    def received(ids: list[int], finish: str) -> ReceivedTokens:
        found = ReceivedTokens("e", 4)
        meta = {"finish_reason": {"type": finish} if finish else None, "weight_version": "1.5"}
        found.take({"output_ids": ids, "meta_info": meta | {"output_token_logprobs": [[-0.5, i, None] for i in ids]}})
        return found

    asked = GenerateRequest(ids=[9], session="s", group="g", max_new_tokens=4, sampling=Sampling(), stop=("cd",))
    for pieces, finish, length in (
        ([([0, 2, 3, 1], "length")], "length", 4),  # what one engine has ended as a whole is as it says
        ([([0, 2, 3], "")], "stop", 3),  # its last chunk was lost
        ([([0, 2], ""), ([3, 1], "length")], "stop", 3),  # the stop string began at another engine
    ):
        decoded: list[list[int]] = []
        turn = TurnAssembler(asked, StopChecker(decode))
        for ids, said in pieces:
            turn.add(received(ids, said))
        done = turn.completion()
        assert done is not None and (done.finish_reason, len(done.ids)) == (finish, length)
        assert bool(decoded) == (finish == "stop")
