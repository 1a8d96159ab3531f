"""Settings of the online engines: fields only. `REGISTRY` maps each class to its provider.

Keys never stand here: a setting holds the name of the environment variable that does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, IPvAnyNetwork, field_validator, model_validator

from protocol.settings import Settings, union_of


class PageSettings(Settings):
    """Fetching the pages behind hits. Only addresses that an answer brought are fetched, and only public ones."""

    in_results: bool = False
    """Hits carry the page's text; where a page cannot be had the snippet stays, and the failure is counted."""
    allow_hosts: tuple[str, ...] = ()
    """Hosts, with all below them (`wikipedia.org` is also `en.wikipedia.org`), that may be fetched. Empty: any."""
    ports: tuple[int, ...] = (80, 443)
    """Ports that may be connected to."""
    allow_private: tuple[IPvAnyNetwork, ...] = ()
    """Networks that are fetched from although they are not public, e.g. a mirror of your own: `10.1.2.0/24`. Whoever
    can place a hit or a redirect can then make this service read from there. IPv6 forms of IPv4 stay refused."""
    max_redirects: int = Field(default=3, ge=0, le=10)
    """Redirects followed; each is checked as the first address was."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Longest time of one page in seconds, from its name's resolution to its last byte, redirects included."""
    max_mb: float = Field(default=1.0, gt=0, le=64)
    """Bytes read of one page (MiB, after decompression); what lies beyond is left out."""
    max_chars: int = Field(default=20_000, ge=1)
    """Longest text of one page, in characters; what lies beyond is left out."""
    concurrency: int = Field(default=8, ge=1)
    """Pages fetched at the same time."""

    @field_validator("allow_hosts")
    @classmethod
    def _plain_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not host or any(c in host for c in "/:*@ "):
                raise ValueError(f"{host!r} is not a host: write `wikipedia.org`, without scheme, port or `*`")
        return tuple(host.lower().strip(".") for host in hosts)


class OnlineBase(Settings):
    """What every online engine has: where it is, its key's variable, its limits, its recordings.

    The defaults of `rate`, `concurrency` and `cost_per_request` are guesses: take the figures of your own plan.
    """

    OPERATION: ClassVar[frozenset[str]] = frozenset(
        {"key_env", "proxy_env", "timeout_s", "deadline_s", "attempts", "backoff_s", "max_retry_after_s", "rate"}
        | {"burst", "concurrency", "max_requests", "max_cost", "budget_period", "cost_per_request", "max_reply_mb"}
        | {"record", "recordings", "remembered"}
    )
    """Fields that decide whether and when there is an answer, not which."""
    NEEDS_KEY: ClassVar[bool] = True
    MAX_HITS: ClassVar[int]
    """Most hits that one request brings. Beyond it an answer is shorter: a second page would be a second request."""

    type: str
    base_url: str
    """Address of the API, without credentials and query."""
    key_env: str
    """Name of the environment variable that holds the key."""
    proxy_env: str = ""
    """Name of the environment variable that holds the proxy's URL for requests to the provider (never for pages)."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Longest time of one request in seconds."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Longest time of one query in seconds: waiting for its turn, all attempts and the pauses between them."""
    attempts: int = Field(default=3, ge=1, le=10)
    """Requests a query, where the earlier ones met 429, 5xx, silence or no connection."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Pause before the second attempt in seconds, +-50 % by chance; doubled for each further one."""
    max_retry_after_s: float = Field(default=10.0, ge=0)
    """Longest `Retry-After` that is waited for, in seconds; a longer one ends the query."""
    rate: float = Field(default=5.0, gt=0)
    """Requests a second, over all queries of this service."""
    burst: int = Field(default=5, ge=1)
    """Requests that may leave at once after a pause."""
    concurrency: int = Field(default=8, ge=1)
    """Requests under way at the same time."""
    max_requests: int | None = Field(default=None, ge=0)
    """Requests in one budget period, each attempt counted; then queries fail with cause `quota`. None: no bound."""
    max_cost: float | None = Field(default=None, ge=0)
    """Money in one budget period, in the unit of `cost_per_request`. None: no bound."""
    budget_period: Literal["day", "total"] = "total"
    """`day`: the budget is new at midnight UTC. Both count from the start of the process."""
    cost_per_request: float = Field(default=0.0, ge=0)
    """What one request costs, in any unit of yours."""
    max_reply_mb: float = Field(default=4.0, gt=0)
    """Largest reply of the provider (MiB, after decompression)."""
    record: Literal["off", "record", "replay", "auto"] = "off"
    """`record`: ask, and keep the reply. `replay`: answer from recordings alone, without network or key. `auto`: a
    recording where there is one, else as `record`."""
    recordings: Path | None = None
    """Directory of the recordings, one JSON file a reply. They hold queries and replies, never the key."""
    answers: bool = True
    """Answer boxes and knowledge panels are hits too, before all others."""
    remembered: int = Field(default=10_000, ge=1)
    """Hits whose ids can still be asked for; the oldest are forgotten."""
    fetch_pages: bool = False
    """The document of an id is the page's text, fetched when it is asked for, instead of the snippet."""
    pages: PageSettings = PageSettings()
    """How pages are fetched."""

    @field_validator("key_env", "proxy_env")
    @classmethod
    def _names_a_variable(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise ValueError(
                "is not the name of an environment variable in capitals: the key itself stays out of files"
            )
        return value

    @field_validator("base_url")
    @classmethod
    def _no_secrets_in_the_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("is not an http:// or https:// address")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError("holds credentials, a query or a fragment: keys come from the environment (`key_env`)")
        return value.rstrip("/")

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.max_cost is not None and self.cost_per_request == 0:
            raise ValueError("max_cost bounds nothing while cost_per_request is 0")
        if self.record != "off" and self.recordings is None:
            raise ValueError(f"record is {self.record!r}, but `recordings` names no directory")
        if self.pages.in_results and not self.fetch_pages:
            raise ValueError("pages.in_results needs fetch_pages=true")
        return self


class SerpApiSettings(OnlineBase):
    """SerpApi: results of Google and other engines. One request brings the engine's first page."""

    MAX_HITS = 100

    type: Literal["serpapi"] = "serpapi"
    base_url: str = "https://serpapi.com/search.json"
    key_env: str = "SERPAPI_API_KEY"
    engine: str = "google"
    """SerpApi's name of the engine: google, bing, duckduckgo, .."""
    country: str = "us"
    """Country of the results (`gl`)."""
    language: str = "en"
    """Language of the results (`hl`)."""


class SerperSettings(OnlineBase):
    """Serper: results of Google."""

    MAX_HITS = 100

    type: Literal["serper"] = "serper"
    base_url: str = "https://google.serper.dev/search"
    key_env: str = "SERPER_API_KEY"
    country: str = "us"
    """Country of the results (`gl`)."""
    language: str = "en"
    """Language of the results (`hl`)."""


class GoogleCseSettings(OnlineBase):
    """Google's Custom Search JSON API over a Programmable Search Engine: at most 10 hits a request, no answer boxes."""

    MAX_HITS = 10

    type: Literal["google_cse"] = "google_cse"
    base_url: str = "https://www.googleapis.com/customsearch/v1"
    key_env: str = "GOOGLE_API_KEY"
    cx: str
    """Id of the Programmable Search Engine. Not a secret."""
    country: str = "us"
    """Country of the user (`gl`)."""
    language: str = "en"
    """Language of the user's interface (`hl`)."""


class BraveSettings(OnlineBase):
    """Brave Search, web results: at most 20 hits a request."""

    MAX_HITS = 20

    type: Literal["brave"] = "brave"
    base_url: str = "https://api.search.brave.com/res/v1/web/search"
    key_env: str = "BRAVE_API_KEY"
    country: str = "us"
    """Country of the results."""
    language: str = "en"
    """Language of the results (`search_lang`)."""
    rate: float = Field(default=1.0, gt=0)
    burst: int = Field(default=1, ge=1)
    extra_snippets: bool = False
    """Ask for further excerpts of each page, and put them behind the first (some plans only)."""


class TavilySettings(OnlineBase):
    """Tavily: at most 20 hits a request; its answer box is written by a model of Tavily's."""

    MAX_HITS = 20

    type: Literal["tavily"] = "tavily"
    base_url: str = "https://api.tavily.com/search"
    key_env: str = "TAVILY_API_KEY"
    depth: Literal["basic", "advanced"] = "basic"
    """`advanced` brings longer, better excerpts and costs two credits."""
    answers: bool = False
    """Ask for the answer that a model of Tavily's writes, and make it the first hit. Off: it would reason in place of
    the policy that is being trained."""


class BingSettings(OnlineBase):
    """Any service that speaks the JSON of Bing's Web Search API v7: at most 50 hits a request.

    Microsoft's own ended in August 2025, so there is no default address.
    """

    MAX_HITS = 50

    type: Literal["bing"] = "bing"
    key_env: str = "BING_API_KEY"
    key_header: str = Field(default="Ocp-Apim-Subscription-Key", pattern=r"^[A-Za-z0-9-]+$")
    """Header that carries the key; with `Authorization` it is sent as `Bearer KEY`."""
    market: str = "en-US"
    """Market of the results (`mkt`)."""


class SearxngSettings(OnlineBase):
    """A SearXNG of your own. Its settings.yml must list `json` under `search.formats`."""

    NEEDS_KEY = False
    MAX_HITS = 1000

    type: Literal["searxng"] = "searxng"
    base_url: str = "http://127.0.0.1:8080/search"
    key_env: str = ""
    """Name of the environment variable with a token for a proxy before it, sent as `Authorization: Bearer`. Empty:
    none."""
    language: str = "en"
    """Language of the results."""
    categories: tuple[str, ...] = ("general",)
    """Categories that are searched."""
    engines: tuple[str, ...] = ()
    """Engines that are asked. Empty: those of the categories."""


REGISTRY: dict[type[OnlineBase], str] = {
    SerpApiSettings: "retriever.backends.web.providers.google:SerpApi",
    SerperSettings: "retriever.backends.web.providers.google:Serper",
    GoogleCseSettings: "retriever.backends.web.providers.google:GoogleCse",
    BraveSettings: "retriever.backends.web.providers.brave:Brave",
    TavilySettings: "retriever.backends.web.providers.tavily:Tavily",
    BingSettings: "retriever.backends.web.providers.bing:Bing",
    SearxngSettings: "retriever.backends.web.providers.searxng:Searxng",
}
"""Settings class to provider class, which is imported when it is needed."""

if TYPE_CHECKING:
    OnlineSettings = OnlineBase
else:
    OnlineSettings = union_of(REGISTRY)
