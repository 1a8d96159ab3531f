"""Settings of the web search engines: fields only. `REGISTRY` maps each class to its provider.

Keys are never settings: a setting names the environment variable that contains the key.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, IPvAnyNetwork, field_validator, model_validator

from protocol.settings import Settings, union_of


class PageSettings(Settings):
    """Fetching the pages of hits. Only addresses from a provider's answer are fetched, and only public ones."""

    in_results: bool = False
    """Return the page's text in hits; if a page is unavailable, its snippet is returned and the failure counted."""
    allow_hosts: tuple[str, ...] = ()
    """Allowed hosts, including their subdomains (`wikipedia.org` includes `en.wikipedia.org`). Empty: any."""
    ports: tuple[int, ...] = (80, 443)
    """Allowed ports."""
    allow_private: tuple[IPvAnyNetwork, ...] = ()
    """Non-public networks that may be fetched, e.g. a mirror of your own: `10.1.2.0/24`. Anyone who can place a hit or
    a redirect can then make this service read from there. IPv6 forms of IPv4 addresses stay refused."""
    max_redirects: int = Field(default=3, ge=0, le=10)
    """Maximum redirects; each is checked like the first address."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Timeout for one page, in seconds, from name resolution to the last byte, including redirects."""
    max_mb: float = Field(default=1.0, gt=0, le=64)
    """Maximum size of one page, in MiB after decompression; the rest is dropped."""
    max_chars: int = Field(default=20_000, ge=1)
    """Maximum text of one page, in characters; the rest is dropped."""
    concurrency: int = Field(default=8, ge=1)
    """Maximum concurrent page fetches."""

    @field_validator("allow_hosts")
    @classmethod
    def _plain_hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if not host or any(c in host for c in "/:*@ "):
                raise ValueError(f"{host!r} is not a host: write `wikipedia.org`, without scheme, port or `*`")
        return tuple(host.lower().strip(".") for host in hosts)


class WebBase(Settings):
    """Common settings of web search engines: address, key variable, limits, recordings.

    The defaults of `rate`, `concurrency` and `cost_per_request` are guesses: use the figures of your plan.
    """

    OPERATION: ClassVar[frozenset[str]] = frozenset(
        {"key_env", "proxy_env", "timeout_s", "deadline_s", "attempts", "backoff_s", "max_retry_after_s", "rate"}
        | {"burst", "concurrency", "max_requests", "max_cost", "budget_period", "cost_per_request", "max_reply_mb"}
        | {"record", "recordings", "remembered"}
    )
    """Fields that affect whether and when there is an answer, not its content."""
    NEEDS_KEY: ClassVar[bool] = True
    MAX_HITS: ClassVar[int]
    """Maximum hits per request. Larger searches get fewer hits: a second page would cost a second request."""

    type: str
    base_url: str
    """Address of the API, without credentials and query."""
    key_env: str
    """Name of the environment variable that holds the key."""
    proxy_env: str = ""
    """Name of the environment variable that holds the proxy's URL for requests to the provider (never for pages)."""
    timeout_s: float = Field(default=10.0, gt=0)
    """Timeout for one request, in seconds."""
    deadline_s: float = Field(default=30.0, gt=0)
    """Timeout for one query, in seconds, including rate limiting, all attempts and the pauses between them."""
    attempts: int = Field(default=3, ge=1, le=10)
    """Maximum attempts per query, after 429, 5xx, a timeout or no connection."""
    backoff_s: float = Field(default=0.5, ge=0)
    """Pause before the second attempt, in seconds, with +-50 % jitter; doubled for each further attempt."""
    max_retry_after_s: float = Field(default=10.0, ge=0)
    """Maximum `Retry-After` to wait for, in seconds; a longer one fails the query."""
    rate: float = Field(default=5.0, gt=0)
    """Requests per second, over all queries of this service."""
    burst: int = Field(default=5, ge=1)
    """Burst: requests that may be sent in one go after a pause."""
    concurrency: int = Field(default=8, ge=1)
    """Maximum concurrent requests."""
    max_requests: int | None = Field(default=None, ge=0)
    """Maximum requests in a budget period, counting each attempt; then queries fail with cause `quota`. null:
    unlimited."""
    max_cost: float | None = Field(default=None, ge=0)
    """Maximum cost in a budget period, in the unit of `cost_per_request`. null: unlimited."""
    budget_period: Literal["day", "total"] = "total"
    """Budget period; `day` resets at midnight UTC. Both count from the start of the process."""
    cost_per_request: float = Field(default=0.0, ge=0)
    """Cost of one request, in any unit."""
    max_reply_mb: float = Field(default=4.0, gt=0)
    """Maximum reply of the provider, in MiB after decompression."""
    record: Literal["off", "record", "replay", "auto"] = "off"
    """`record`: send requests and record the replies. `replay`: answer from recordings only, without network or key.
    `auto`: use a recording if there is one, otherwise as `record`."""
    recordings: Path | None = None
    """Directory of the recordings, one JSON file per reply. They contain queries and replies, never the key."""
    answers: bool = True
    """Include answer boxes and knowledge panels as the first hits."""
    remembered: int = Field(default=10_000, ge=1)
    """Number of hits that can be fetched by id; the oldest are evicted."""
    fetch_pages: bool = False
    """Fetch by id returns the page's text, fetched on demand, instead of the snippet."""
    pages: PageSettings = PageSettings()
    """Page fetching."""

    @field_validator("key_env", "proxy_env")
    @classmethod
    def _names_a_variable(cls, value: str) -> str:
        if value and not re.fullmatch(r"[A-Z_][A-Z0-9_]*", value):
            raise ValueError(
                "must be the name of an environment variable, in capitals: keep the key itself out of files"
            )
        return value

    @field_validator("base_url")
    @classmethod
    def _no_secrets_in_the_address(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("must be an http:// or https:// address")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(
                "must not contain credentials, a query or a fragment: keys come from the environment (`key_env`)"
            )
        return value.rstrip("/")

    @model_validator(mode="after")
    def _fields_fit(self) -> Self:
        if self.max_cost is not None and self.cost_per_request == 0:
            raise ValueError("max_cost has no effect while cost_per_request is 0: set cost_per_request")
        if self.record != "off" and self.recordings is None:
            raise ValueError(f"record is {self.record!r}: set `recordings` to a directory")
        if self.pages.in_results and not self.fetch_pages:
            raise ValueError("pages.in_results needs fetch_pages=true")
        return self


class SerpApiSettings(WebBase):
    """SerpApi: results of Google and other engines. One request returns the engine's first page."""

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


class SerperSettings(WebBase):
    """Serper: results of Google."""

    MAX_HITS = 100

    type: Literal["serper"] = "serper"
    base_url: str = "https://google.serper.dev/search"
    key_env: str = "SERPER_API_KEY"
    country: str = "us"
    """Country of the results (`gl`)."""
    language: str = "en"
    """Language of the results (`hl`)."""


class GoogleCseSettings(WebBase):
    """Google's Custom Search JSON API over a Programmable Search Engine: at most 10 hits per request, no answer
    boxes."""

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


class BraveSettings(WebBase):
    """Brave Search, web results: at most 20 hits per request."""

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
    """Request further excerpts of each page and append them to the first (some plans only)."""


class TavilySettings(WebBase):
    """Tavily: at most 20 hits per request; a model of Tavily writes its answer box."""

    MAX_HITS = 20

    type: Literal["tavily"] = "tavily"
    base_url: str = "https://api.tavily.com/search"
    key_env: str = "TAVILY_API_KEY"
    depth: Literal["basic", "advanced"] = "basic"
    """`advanced` returns longer, better excerpts and costs two credits."""
    answers: bool = False
    """Request the answer written by Tavily's model and return it as the first hit. By default off: that model would
    reason in place of the policy."""


class SearxngSettings(WebBase):
    """A self-hosted SearXNG. Its settings.yml must list `json` under `search.formats`."""

    NEEDS_KEY = False
    MAX_HITS = 1000

    type: Literal["searxng"] = "searxng"
    base_url: str = "http://127.0.0.1:8080/search"
    key_env: str = ""
    """Environment variable with a token for a proxy in front of it, sent as `Authorization: Bearer`. Empty:
    none."""
    language: str = "en"
    """Language of the results."""
    categories: tuple[str, ...] = ("general",)
    """Categories to search."""
    engines: tuple[str, ...] = ()
    """Engines to query. Empty: those of the categories."""


REGISTRY: dict[type[WebBase], str] = {
    SerpApiSettings: "retriever.backends.web.providers.google:SerpApi",
    SerperSettings: "retriever.backends.web.providers.google:Serper",
    GoogleCseSettings: "retriever.backends.web.providers.google:GoogleCse",
    BraveSettings: "retriever.backends.web.providers.brave:Brave",
    TavilySettings: "retriever.backends.web.providers.tavily:Tavily",
    SearxngSettings: "retriever.backends.web.providers.searxng:Searxng",
}
"""Settings class -> provider class, imported on demand."""

if TYPE_CHECKING:
    WebSettings = WebBase
else:
    WebSettings = union_of(REGISTRY)
