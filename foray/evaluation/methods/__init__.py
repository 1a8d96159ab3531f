"""Methods: how a model answers a question. Their settings and registry.

The policy's own rollouts need no method here: the rollout server runs them (`foray.evaluation.runner`). For an
endpoint `policy` runs the same loop over messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pkgutil import resolve_name

from pydantic import TypeAdapter, ValidationError

from foray.evaluation.methods.base import Method, MethodSettingsBase
from foray.evaluation.methods.flare import FlareSettings
from foray.evaluation.methods.ircot import IRCoTSettings
from foray.evaluation.methods.policy import PolicyMethodSettings
from foray.evaluation.methods.prompts import Prompts
from foray.evaluation.methods.rag import IterRetGenSettings, NaiveRAGSettings
from foray.evaluation.methods.without_search import ChainOfThoughtSettings, DirectSettings
from protocol.errors import UserError
from protocol.runtime.config import NOT_YAML, parse_yaml
from protocol.runtime.settings_errors import explain, suggest

REGISTRY: dict[type[MethodSettingsBase], str] = {
    PolicyMethodSettings: "foray.evaluation.methods.policy:PolicyOverMessages",
    DirectSettings: "foray.evaluation.methods.without_search:Direct",
    ChainOfThoughtSettings: "foray.evaluation.methods.without_search:ChainOfThought",
    NaiveRAGSettings: "foray.evaluation.methods.rag:NaiveRAG",
    IterRetGenSettings: "foray.evaluation.methods.rag:IterRetGen",
    IRCoTSettings: "foray.evaluation.methods.ircot:IRCoT",
    FlareSettings: "foray.evaluation.methods.flare:Flare",
}
"""Settings class -> "module:Class"; the class takes the settings and the prompts."""

NAMES: dict[str, type[MethodSettingsBase]] = {kind.model_fields["type"].default: kind for kind in REGISTRY}
POLICY = "policy"


def build_method(settings: MethodSettingsBase, prompts: Prompts) -> Method:
    """Instantiate the method for `settings`. Raises UserError if the model has no prompts for it."""
    if missing := [part for part in settings.prompts if part not in prompts.parts]:
        raise UserError(
            f"a model with the {prompts.name} prompts cannot be evaluated by {settings.type}",
            why=f"its vocabulary has no words for the prompt {missing[0]!r}",
            todo="leave the method out of --methods",
        )
    method: Method = resolve_name(REGISTRY[type(settings)])(settings, prompts)
    return method


def parse_methods(given: Sequence[str]) -> list[MethodSettingsBase]:
    """Return the settings of methods given by name (`all`: every method) or as YAML: `{type: flare, threshold: 0.5}`.

    Raises UserError for an unknown method or option, or one that is given twice.
    """
    words = [word for one in given for word in ([*NAMES] if one == "all" else [one])]
    found: list[MethodSettingsBase] = []
    for word in words:
        value = _mapping(word)
        kind = NAMES.get(str(value.get("type")))
        if kind is None:
            raise UserError(f"unknown method {word!r}", todo=suggest(str(value.get("type")), (*NAMES, "all")))
        try:
            found.append(TypeAdapter(kind).validate_python(value))
        except ValidationError as error:
            raise UserError("\n       ".join(explain(error, "--methods", kind))) from None
    names = [settings.type for settings in found]
    if len(set(names)) < len(names):
        raise UserError("a method is given twice", todo="name each method once")
    return found


def _mapping(word: str) -> dict[str, object]:
    if not word.startswith("{"):
        return {"type": word}
    try:
        value = parse_yaml(word)
    except NOT_YAML as error:
        raise UserError(f"the method {word!r} is not valid YAML", why=" ".join(str(error).split())) from None
    return value if isinstance(value, dict) else {}
