"""When a generation ends: length, end tokens, stop strings.

A stop string may span tokens, and a token may be a piece of a character, so the tail has to be decoded. Decoding
at every token would cost more than the forward pass of a small model; but a stop string can only end inside the newest
token if that token's own text has a beginning that is an end of the stop string (or holds it whole). That is a yes
or no for each token id, worked out once, and nearly always no.
"""

from __future__ import annotations

from rollout_server.cpu_engine.request import Finish, Request
from rollout_server.cpu_engine.tokenizer import Tokenizer


class StopStrings:
    """One set of stop strings under one tokenizer; shared by all requests that use the same set."""

    def __init__(self, stops: tuple[str, ...], tokenizer: Tokenizer) -> None:
        self.stops, self._tokenizer = stops, tokenizer
        # a character takes up to 4 byte tokens; the margin covers tokens that add no text
        self._window = 4 * max(len(stop) for stop in stops) + 8
        self._may_end: dict[int, bool] = {}

    def hit(self, ids: list[int]) -> str | None:
        """The first of the stop strings (in the order given) that the text of the tail of `ids` contains."""
        newest = ids[-1]
        may_end = self._may_end.get(newest)
        if may_end is None:
            may_end = self._may_end[newest] = self._can_end_with(newest)
        if not may_end:
            return None
        tail = self._tokenizer.decode(ids[-self._window :], False)
        return next((stop for stop in self.stops if stop in tail), None)

    def _can_end_with(self, token: int) -> bool:
        text = self._tokenizer.decode([token], False)
        if not text or "\ufffd" in text:
            return True
        # tokenizers drop or add a space between words, which one token alone does not show
        return any(_reaches(stop, form) for stop in self.stops for form in (text, text.lstrip(), " " + text))


def _reaches(stop: str, text: str) -> bool:
    return stop in text or any(text.startswith(stop[-n:]) for n in range(1, min(len(stop), len(text)) + 1))


class Stopping:
    """Decides after each token; holds the shared StopStrings."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._strings: dict[tuple[str, ...], StopStrings] = {}

    def end_ids(self, request: Request) -> frozenset[int]:
        """Tokens that end `request`: none with ignore_eos, which in SGLang silences stop_token_ids too."""
        params = request.params
        return frozenset() if params.ignore_eos else self._tokenizer.eos_ids | params.stop_token_ids

    def check(self, request: Request) -> Finish | None:
        """Why `request` ends with its newest token, or None. Length comes first, as in SGLang."""
        ids = request.output_ids
        if len(ids) >= request.limit:
            return {"type": "length", "length": len(ids)}
        if ids[-1] in request.end_ids:
            return {"type": "stop", "matched": ids[-1]}
        if request.params.stop:
            matched = self._of(request.params.stop).hit(ids)
            if matched is not None:
                return {"type": "stop", "matched": matched}
        return None

    def _of(self, stops: tuple[str, ...]) -> StopStrings:
        found = self._strings.get(stops)
        if found is None:
            if len(self._strings) >= 256:  # a client that sends ever new sets must not grow us
                self._strings.clear()
            found = self._strings[stops] = StopStrings(stops, self._tokenizer)
        return found


def visible_text(request: Request, length: int, tokenizer: Tokenizer) -> str:
    """Text of the first `length` output tokens. The ids are never cut, the text is as in SGLang: before what ended it.

    With no_stop_trim it ends with what ended it: the newest token may reach beyond a stop string.
    """
    ids, params, finish = request.output_ids[:length], request.params, request.finish
    matched = finish.get("matched") if finish else None
    if isinstance(matched, int) and not params.no_stop_trim and ids and ids[-1] == matched:
        ids.pop()
    text = tokenizer.decode(ids, params.skip_special_tokens)
    if isinstance(matched, str) and (at := text.find(matched)) >= 0:
        return text[: at + len(matched)] if params.no_stop_trim else text[:at]
    return text
