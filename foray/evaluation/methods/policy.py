"""The policy's own protocol over an endpoint: the multi-turn loop of a template, as messages.

With a run, a checkpoint or a model folder, the rollout server runs the policy, token by token as in training. An
endpoint has only messages, so each observation is a user message: a model trained with Foray is at a disadvantage here.
"""

from __future__ import annotations

from typing import Literal

from foray.evaluation.methods.base import Episode, MethodSettingsBase
from foray.evaluation.methods.prompts import Prompts
from foray.evaluation.models import EndpointModel, EpisodeFailed, Generated
from rollout_server.environment.actions import AnswerAction, SearchAction, escape_tags, parse


class PolicyMethodSettings(MethodSettingsBase):
    """The policy itself: reasons, searches and answers in the tags of its template.

    `max_tokens` and `turns` are used for endpoints; elsewhere the limits of `rollout.episode` are used.
    """

    type: Literal["policy"] = "policy"
    max_tokens: int = 500
    """Maximum tokens of a turn (endpoints only)."""
    turns: int = 4
    """Maximum searches; then one more turn (endpoints only)."""


class PolicyOverMessages:
    """The loop of the template over an endpoint: user, assistant with an action, user with the observation, ..."""

    def __init__(self, settings: PolicyMethodSettings, prompts: Prompts) -> None:
        self._settings, self._template = settings, prompts.template

    async def __call__(self, question: str, episode: Episode) -> str | None:
        if not isinstance(episode.model, EndpointModel) or episode.model.has_logprobs:
            raise EpisodeFailed("unsupported", "the policy's loop needs a chat endpoint")
        template = self._template
        shown = template.prompt.format(question=template.format_question(question))
        messages: list[dict[str, str]] = []
        for turn in range(self._settings.turns + 1):
            messages.append({"role": "user", "content": shown})
            said = await episode.model.send(
                {"messages": messages}, self._settings.max_tokens, template.stops, episode.sampling
            )
            said = self._closed(said)
            episode.record(shown, said)
            action = parse(said.text, box=template.boxed)
            if isinstance(action, AnswerAction):
                return action.text
            if turn == self._settings.turns or not (isinstance(action, SearchAction) or template.invalid):
                return None
            messages.append({"role": "assistant", "content": said.text})
            shown = template.invalid
            if isinstance(action, SearchAction):
                passages = await episode.search(action.query)
                found = escape_tags(template.format_passages(passages)) if passages else template.empty
                shown = template.observation.format(passages=found)
        raise AssertionError("the last turn returns")

    def _closed(self, said: Generated) -> Generated:
        """Return the turn with the closing tag, which the endpoint removed as a stop string."""
        for stop in self._template.stops:
            opening = stop.replace("</", "<")
            if said.stopped and said.text.rfind(opening) > said.text.rfind(stop):
                return Generated(said.text + stop, said.tokens, said.num_tokens, said.num_read, True, said.version)
        return said
