"""The environment of a policy: template, tokenizer, limits, tools and rewards."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from functools import partial
from pathlib import Path

from protocol.errors import UserError
from protocol.messages import Trajectory
from protocol.search import Passage
from rollout_server.environment.actions import MAX_CHARS_PER_TOKEN, enclose, escape_tags, passages_text
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.environment.prompts import TEMPLATES
from rollout_server.environment.prompts.base import PromptTemplate, tokenizer_for
from rollout_server.environment.tokenizer import TrajectoryTokenizer, load_tokenizer
from rollout_server.rewards import build_reward
from rollout_server.rewards.composite import CompositeReward, RewardPart
from rollout_server.rewards.resources import RewardResources
from rollout_server.tools import build_tool
from rollout_server.tools.base import NoTool, Tool

SHORT_CHARS = 3
"""A text with fewer characters for each token that it may have probably fits."""
NEAR_CHARS = 128
"""Texts whose lengths differ by more than this differ in their number of tokens."""


@dataclass(frozen=True)
class Environment:
    """State shared by all trajectories of a process, built once from the settings.

    prompt_tokenizer  encodes prompts, with the template's system message; `tokenizer` is for everything else
    resources         connections shared by the rewards
    score             computes all rewards of a finished trajectory
    before, after     ids of the tags around the passages of an observation
    invalid           ids of the observation after a turn without an action; empty if such a turn ends the trajectory
    one_text          the tags are plain text to the tokenizer, so an observation is encoded as one text
    tools             the enabled tools by tag, in the order of the settings
    """

    settings: EnvironmentSettings
    template: PromptTemplate
    tokenizer: TrajectoryTokenizer
    prompt_tokenizer: TrajectoryTokenizer
    score: CompositeReward
    resources: RewardResources
    before: tuple[int, ...]
    after: tuple[int, ...]
    invalid: tuple[int, ...]
    one_text: bool
    tools: Mapping[str, Tool] = field(default_factory=dict)

    @property
    def tags(self) -> tuple[str, ...]:
        """Tags of the enabled tools."""
        return tuple(self.tools)

    def prompt(self, question: str) -> list[int]:
        """Return the prompt ids for a question."""
        before, after = self.template.prompt_frame
        return self.prompt_tokenizer.prompt(
            before, self.template.format_question(question), after, chat=self.template.chat
        )

    @property
    def min_observation_tokens(self) -> int:
        """Number of tokens of the shortest observation."""
        return len(self.before) + len(self.after) + 1

    def observation(self, passages: Sequence[Passage], limit: int, *, failed: bool = False) -> list[int]:
        """Return the ids of the observation after a search, at most `limit` (>= `min_observation_tokens`).

        Passages cannot insert control tokens or protocol tags.
        """
        if failed or not passages:
            return self._framed(
                self.template.failed if failed else self.template.empty, limit, self.tokenizer.encode_trusted
            )
        return self._framed(passages_text(self.template, passages, limit, self.tags), limit, self._start_of(limit))

    def text_observation(self, text: str, limit: int) -> list[int]:
        """Return the ids of a tool's text, at most `limit`. Escaped and cut like passages."""
        return self._framed(escape_tags(text[: limit * MAX_CHARS_PER_TOKEN], self.tags), limit, self._start_of(limit))

    def _start_of(self, limit: int) -> Callable[[str], list[int]]:
        return partial(self.tokenizer.encode_untrusted, count=limit)

    def tool_failed(self, limit: int) -> list[int]:
        """Return the ids of the observation after a failure of a tool, at most `limit`."""
        return self._framed(self.template.tool_failed, limit, self.tokenizer.encode_trusted)

    def _framed(self, text: str, limit: int, encode: Callable[[str], list[int]]) -> list[int]:
        """Return the ids of `text` between the tags, at most `limit`. The text is cut if necessary, the tags are not.

        If the tags are plain text, all is encoded as one text: a token may span a boundary (">Doc", ".</"), as in the
        training of Search-R1's and ReSearch's models. Tags that are single tokens are encoded separately.
        """
        if self.one_text:
            before, after = self.template.observation_frame
            whole, short = before + text + after, len(text) < SHORT_CHARS * limit
            # most texts are encoded only once: a short one fits, and a long one is not shorter with the closing tag
            if short and len(ids := encode(whole)) <= limit:
                return ids
            start = encode(before + text)
            if not short and len(start) <= limit and len(ids := encode(whole)) <= limit:
                return ids
            start = start[: limit - len(self.after)]
            if self.tokenizer.decode(start).startswith(before):
                return [*start, *self.after]
        return enclose(self.before, encode(text), self.after, limit)

    def observation_text(self, ids: Sequence[int]) -> str:
        """Return the text between the tags of an observation."""
        if self.one_text:
            before, after = self.template.observation_frame
            text = self.tokenizer.decode(ids)
            if text.startswith(before) and text.endswith(after):
                return text[len(before) : len(text) - len(after)]
        return self.tokenizer.decode(ids[len(self.before) : len(ids) - len(self.after)])

    def max_calls_of(self, tool: str) -> int | None:
        """Return the maximum number of calls of a tool per trajectory; None: no limit."""
        return next((given.max_calls for given in self.settings.tools if given.type == tool), None)

    def visible_passages(self, passages: Sequence[Passage], limit: int, ids: Sequence[int]) -> Sequence[Passage]:
        """Return the passages visible in `ids`, which are `observation(passages, limit)`. The last may be cut.

        Only passages that end about where the text of `ids` ends are encoded again.
        """
        if len(ids) < limit:
            return passages
        space, shown = limit - len(self.before) - len(self.after), self.observation_text(ids)

        def fill(number: int) -> bool:
            text = passages_text(self.template, passages[:number], limit, self.tags)
            common = min(len(text), len(shown)) - NEAR_CHARS
            if abs(len(text) - len(shown)) > NEAR_CHARS and common > 0 and text[:common] == shown[:common]:
                return len(text) > len(shown)
            return len(self.tokenizer.encode_untrusted(text, space)) >= space

        return passages[: 1 + bisect_left(range(1, len(passages)), True, key=fill)]

    def without_documents(self) -> Environment:
        """Return this environment with tools that return no documents, for use with a disabled search."""
        silent = {tool.type for tool in self.settings.tools if tool.retrieves}
        return replace(self, tools={name: NoTool(name) if name in silent else t for name, t in self.tools.items()})

    async def close(self) -> None:
        """Close the connections of rewards and tools, and cancel calls in flight. Safe to call twice."""
        for tool in self.tools.values():
            await tool.close()
        await self.resources.close()


def build_environment(
    settings: EnvironmentSettings, model_dir: Path, *, urls: Sequence[str] | None = None, day: date | None = None
) -> Environment:
    """Build the environment of a process. The caller closes it.

    settings   `rollout.episode`
    model_dir  model folder, whose tokenizer is read
    day        date for chat templates that contain one (`run.date`)
    urls       base URLs of the retrievers, which may change, the default of tools that fetch documents; None: no URL

    Raises UserError for a missing or broken tokenizer, limits that are too small, or a reward or tool that cannot be
    built.
    """
    given = settings.tools
    template = TEMPLATES[settings.template].with_tools(
        [(tool.type, tool.told) for tool in given], show_ids=any(tool.shows_ids for tool in given)
    )
    tokenizer = load_tokenizer(model_dir, day)
    before, after = (tuple(tokenizer.encode_trusted(text)) for text in template.observation_frame)
    resources = RewardResources()
    environment = Environment(
        settings=settings,
        template=template,
        tokenizer=tokenizer,
        prompt_tokenizer=tokenizer_for(template, tokenizer, model_dir, day),
        score=CompositeReward(
            [RewardPart(build_reward(part, resources), part.weight, part.sources) for part in settings.rewards]
        ),
        resources=resources,
        before=before,
        after=after,
        invalid=tuple(tokenizer.encode_trusted(template.invalid)),
        one_text=all(
            tokenizer.encode_trusted(text) == tokenizer.encode_untrusted(text) for text in template.observation_frame
        ),
        tools={tool.type: build_tool(tool, urls) for tool in given},
    )
    needed = len(environment.prompt("")) + settings.reserve_tokens
    if needed > settings.max_context:
        raise UserError(
            f"rollout.episode.max_context = {settings.max_context} is too small",
            why=f"the prompt of template {template.name!r} alone has {needed - settings.reserve_tokens} tokens",
            todo="raise rollout.episode.max_context",
        )
    if environment.min_observation_tokens > settings.max_obs_tokens:
        raise UserError(
            f"rollout.episode.max_obs_tokens = {settings.max_obs_tokens} is too small",
            why=f"the tags of an observation of template {template.name!r} alone have "
            f"{environment.min_observation_tokens - 1} tokens",
            todo="raise rollout.episode.max_obs_tokens",
        )
    return environment


def render_trajectory(environment: Environment, trajectory: Trajectory) -> str:
    """Return the text of all tokens of a trajectory, with tags and control tokens."""
    return environment.tokenizer.decode(trajectory.ids.tolist())
