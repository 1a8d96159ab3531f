"""HTTP bodies of the retriever, in Search-R1's dialect.

    POST /retrieve {"queries": ["..."], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "..", "contents": "\"Title\"\ntext"}, "score": 0.87}, ...], ...]}

With `return_scores` false each inner list holds the bare documents: [{"id": .., "contents": ..}, ...].
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

MAX_QUERY_CHARS = 4096
MAX_QUERIES = 4096
MAX_TOPK = 1000


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class SearchRequest(_Body):
    """Body of `POST /retrieve`. `topk` None means the server's default."""

    queries: list[Annotated[str, Field(max_length=MAX_QUERY_CHARS)]] = Field(max_length=MAX_QUERIES)
    topk: int | None = Field(default=None, ge=1, le=MAX_TOPK)
    return_scores: bool = False
    partial: bool = False
    """Answer the other queries when one fails (`SearchResponse.errors`). Without it one failure fails the request: a
    client that does not look at `errors` must not take a failure for an empty result."""
    run: str = Field(default="", max_length=128)
    """Whose memory of earlier searches is used, where the server keeps one."""


class Passage(_Body):
    """One document: `contents` is `"Title"` (in double quotes), a newline, then the text."""

    id: str = ""
    contents: str

    @property
    def title(self) -> str:
        """First line of the contents, without its quotes."""
        return self.contents.partition("\n")[0].strip().strip('"')

    @property
    def text(self) -> str:
        """What follows the title line."""
        return self.contents.partition("\n")[2]


class ScoredPassage(_Body):
    """One hit: higher scores are better; the scale is the index's own."""

    document: Passage
    score: float


class SearchResponse(_Body):
    """Body of the answer to `/retrieve` with `return_scores` true: one list of hits a query, best first."""

    result: list[list[ScoredPassage]]
    errors: list[str | None] | None = None
    """One cause a query (None: it was answered), present only when `partial` was asked for and a query failed."""
