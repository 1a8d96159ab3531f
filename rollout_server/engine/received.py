"""What one request has brought so far, kept whatever ends it: pure.

Versions. Where the engine says which version sampled which token (`weight_versions`: the embedded engine in every
chunk, SGLang in the last one), that counts. A stream that breaks before that has only the label that each chunk
carries. A chunk during which the label changed may hold tokens of both versions: from there on no token is kept, and
they are counted, since a token with a wrong version would be trained with a wrong ratio.
"""

from __future__ import annotations

from typing import Any

from protocol.versions import PolicyVersion
from rollout_server.engine.base import EngineError
from rollout_server.engine.reply import Spans, check_tokens, error_in_stream, read_chunk, version_of

ABORT_CAUSE = {400: "refused", 500: "http_500"}
"""Status code in an abort's finish reason -> cause. Any other abort, 503 (the queue is full) included: `aborted`."""


class Received:
    """Tokens of one request to `engine`.

    limit       most tokens that were asked for
    vocab_size  ids must be below it; None: unknown
    label       version that the engine was known to hold when it was asked; "" unknown
    fixed       version of every token, whatever the engine says: it knows its base model, and not the adapter's step

    ids [n], logprobs [n]; finish_reason and matched as in Completion, "" while more may come.
    """

    def __init__(
        self,
        engine: str,
        limit: int,
        *,
        vocab_size: int | None = None,
        label: str = "",
        fixed: PolicyVersion | None = None,
    ) -> None:
        self.engine, self._limit, self._vocab_size = engine, limit, vocab_size
        self._fixed = fixed
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.finish_reason = ""
        self.matched: str | int | None = None
        self.chunks = 0
        self._expected = label
        """Label of every chunk so far; the one that was known beforehand at first."""
        self._sure = 0
        """Tokens before the first chunk whose label was another."""
        self._changed = False
        self._labels: set[str] = set()
        self._spans: Spans = ()

    def take(self, reply: Any) -> None:
        """A decoded answer or chunk. Raises EngineError: bad_output, aborted (tokens kept), refused, http_500."""
        error = error_in_stream(reply, self.engine)
        if error is not None:
            raise error
        try:
            chunk = read_chunk(reply, self.ids)
            check_tokens(chunk, self._limit - len(self.ids), self._vocab_size)
            if chunk.finish is not None and chunk.finish["type"] != "abort" and not (self.ids or chunk.ids):
                raise ValueError("no tokens")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as problem:
            detail = f"{type(problem).__name__}: {str(problem)[:200]}"
            raise EngineError("bad_output", self.engine, detail) from None
        self.chunks += 1
        self.ids += chunk.ids
        self.logprobs += chunk.logprobs
        self._note_version(chunk.label, chunk.spans)
        if chunk.finish is not None:
            self._finish(chunk.finish)

    def _note_version(self, label: str, spans: Spans | None) -> None:
        self._labels.add(label)
        self._expected = self._expected or label
        self._changed = self._changed or label != self._expected
        if not self._changed:
            self._sure = len(self.ids)
        if spans is not None:
            self._spans = spans

    def _finish(self, finish: dict[str, Any]) -> None:
        if finish["type"] == "abort":
            status = finish.get("status_code")
            cause = ABORT_CAUSE.get(status if isinstance(status, int) else 0, "aborted")
            raise EngineError(cause, self.engine, str(finish.get("message", ""))[:200])
        self.finish_reason = finish["type"]
        matched = finish.get("matched")
        self.matched = matched if isinstance(matched, str | int) else None

    def spans(self) -> Spans:
        """The versions of the first tokens, as far as they are known for sure: they may end before the tokens do."""
        n = len(self.ids)
        if self._fixed is not None:
            return ((self._fixed, 0, n),) if n else ()
        if self._spans:
            return self._spans
        # an answer that ended well under one label is that version's, even if the table was behind
        sure = n if self.finish_reason and len(self._labels) == 1 else self._sure
        label = next(iter(self._labels), "") if sure == n else self._expected
        return ((version_of(label), 0, sure),) if sure else ()
