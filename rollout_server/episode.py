"""What every trajectory of a process shares: template, tokenizer, limits and rewards, made once from the settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import UserError
from protocol.messages import Trajectory
from protocol.search import Passage
from rollout_server.actions import enclose, passages_text
from rollout_server.config_episode import EpisodeSettings, SearchSettings
from rollout_server.prompts.base import PromptTemplate
from rollout_server.prompts.system import tokens_for
from rollout_server.prompts.table import TEMPLATES
from rollout_server.reward.composite import Composite
from rollout_server.reward.io import Io
from rollout_server.search.base import SearchService
from rollout_server.tokens import Tokens, load_tokens


@dataclass(frozen=True)
class Episode:
    """The environment's side of the protocol, in tokens.

    prompter       encodes prompts, with the template's system message; `tokens` does everything else
    before, after  ids of the tags around the passages of an observation
    invalid        ids of the answer to a turn that did nothing, empty when such a turn ends the trajectory
    io             what the rewards ask others through
    """

    settings: EpisodeSettings
    template: PromptTemplate
    tokens: Tokens
    prompter: Tokens
    score: Composite
    io: Io
    before: tuple[int, ...]
    after: tuple[int, ...]
    invalid: tuple[int, ...]

    def prompt(self, question: str) -> list[int]:
        """Ids of the prompt for a question."""
        before, after = self.template.frame
        return self.prompter.prompt(before, self.template.wording(question), after, chat=self.template.chat)

    @property
    def least_observation(self) -> int:
        """Tokens of an observation with next to nothing in it."""
        return len(self.before) + len(self.after) + 1

    def observation(self, passages: Sequence[Passage], limit: int, *, failed: bool = False) -> list[int]:
        """Ids of the answer to a search, at most `limit` of them (not less than `least_observation`).

        No passage can put a control token or a protocol tag in there.
        """
        if failed or not passages:
            body = self.tokens.own(self.template.failed if failed else self.template.empty)
        else:
            body = self.tokens.foreign(passages_text(self.template, passages, limit))
        return enclose(self.before, body, self.after, limit)

    def shown(self, passages: Sequence[Passage], limit: int, used: int) -> Sequence[Passage]:
        """Those of `passages` that `observation(passages, limit)`, `used` ids long, shows; the last may be cut."""
        if used < limit:
            return passages
        room = limit - len(self.before) - len(self.after)
        for number in range(1, len(passages)):
            if len(self.tokens.foreign(passages_text(self.template, passages[:number], limit))) >= room:
                return passages[:number]
        return passages

    async def close(self) -> None:
        """Let go of what the rewards hold. Safe to call twice, and not needed where none of them asks anybody."""
        await self.io.close()


def build_episode(settings: EpisodeSettings, model_dir: Path) -> Episode:
    """The episode of a process; whoever scores with it closes it.

    Raises UserError for a missing or broken tokenizer, limits that cannot work, or a reward that cannot be built.
    """
    template = TEMPLATES[settings.template]
    tokens = load_tokens(model_dir)
    before, after = (tuple(tokens.own(text)) for text in template.around)
    io = Io()
    episode = Episode(
        settings=settings,
        template=template,
        tokens=tokens,
        prompter=tokens_for(template, tokens, model_dir),
        score=Composite([(reward.build(io), reward.weight) for reward in settings.rewards]),
        io=io,
        before=before,
        after=after,
        invalid=tuple(tokens.own(template.invalid)),
    )
    needed = len(episode.prompt("")) + settings.reserve_tokens
    if needed > settings.max_context:
        raise UserError(
            f"rollout.episode.max_context = {settings.max_context} is too small",
            why=f"the prompt of template {template.name!r} alone takes {needed - settings.reserve_tokens} tokens",
            todo="raise rollout.episode.max_context",
        )
    if episode.least_observation > settings.max_obs_tokens:
        raise UserError(
            f"rollout.episode.max_obs_tokens = {settings.max_obs_tokens} is too small",
            why=f"the tags of an observation of template {template.name!r} take {episode.least_observation - 1} tokens",
            todo="raise rollout.episode.max_obs_tokens",
        )
    return episode


def build_search(settings: SearchSettings) -> SearchService:
    """The search that the settings name; the caller closes it. Nothing is connected before the first query."""
    return settings.build()


def render(episode: Episode, trajectory: Trajectory) -> str:
    """Every token of a trajectory as text, tags and control tokens included."""
    return episode.tokens.decode(trajectory.ids.tolist())
