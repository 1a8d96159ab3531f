"""Chat templates: the text that transformers makes, for the idioms that templates of published models use."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from rollout_server.environment.tokenizer import ChatTemplate, load_chat_template, load_tokenizer
from tests.support.environments import write_tokenizer

DAY = date(2026, 1, 31)
TURN = "{{ '<|' + m.role + '|>' + m.content }}"
TURNS = "{% for m in messages %}" + TURN + "{% endfor %}"
SAMPLE = {"b": "ä<&>", "a": [1, {"c": None}]}
IDIOMS = {
    "blocks are trimmed": "{% for m in messages %}\n    {% if true %}\n" + TURN + "\n    {% endif %}\n{% endfor %}\n",
    "generation prompt": TURNS + "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    "date": "{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now('%d %b %Y') }}|{{ strftime_now('%B %-d, %H:%M') }}" + TURNS,
    "guarded date": "{% if strftime_now is defined %}{% set d = strftime_now('%d %b %Y') %}"
    "{% else %}{% set d = '26 Jul 2024' %}{% endif %}Today: {{ d }}\n" + TURNS,
    "generation mark": "{% for m in messages %}{% if m.role == 'assistant' %}<a>{% generation %}{{ m.content }}\n"
    "{%- endgeneration %}</a>{% else %}" + TURN + "{% endif %}{% endfor %}",
    "generation mark has a scope": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "tojson": "{{ sample | tojson }}",
    "tojson ensure_ascii": "{{ sample | tojson(ensure_ascii=true) }}{{ sample | tojson(ensure_ascii=False) }}",
    "tojson indent": "{{ sample | tojson(indent=4) }}",
    "tojson separators, sort_keys": "{{ sample | tojson(separators=(',', ':'), sort_keys=true) }}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "reversed, slices, last user": "{% for m in messages[::-1] %}{% if m['role'] == 'user' %}{{ loop.index0 }}"
    "{{ m.content.strip().split('</think>')[-1].lstrip('\\n') }}{% break %}{% endif %}{% endfor %}",
    "macro": "{% macro show(m, last=false) %}[{{ m.role | upper }}{{ '!' if last }}]{% endmacro %}"
    "{% for m in messages %}{{ show(m, loop.last) }}{% endfor %}",
    "continue": "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}" + TURN + "{% endfor %}",
    "tools none": "{% if tools %}TOOLS{% endif %}{% if tools is not none %}NOT NONE{% endif %}" + TURNS,
    "tools": "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}" + TURNS,
    "special tokens": "{{ bos_token }}" + TURNS + "{{ eos_token }}{{ pad_token is defined }}",
    "undefined variables": "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{{ enable_thinking | default('unset') }}{{ documents is none }}",
    "dict items": "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}{{ messages[0].get('x', 'none') }}",
    "selectattr, map, join": "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content')"
    " | join('+') }}",
    "string and type tests": "{{ messages is string }}{{ messages is iterable }}{{ messages[0] is mapping }}",
}
CHATS: dict[str, Sequence[dict[str, str]]] = {
    "user": [{"role": "user", "content": "Wer? </think>\n ü<b> "}],
    "all roles": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": "three"},
    ],
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import PreTrainedTokenizerFast

    path = write_tokenizer(tmp_path_factory.mktemp("hf"), "bytes")
    return PreTrainedTokenizerFast(tokenizer_file=str(path / "tokenizer.json"), bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("idiom", IDIOMS)
def test_the_text_is_that_of_transformers(theirs: Any, monkeypatch: pytest.MonkeyPatch, idiom: str, chat: str) -> None:
    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Clock:
            return cls.combine(DAY, datetime.time(), tz)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    tools = [{"type": "function", "function": {"name": "search", "parameters": {}}}] if idiom == "tools" else None
    values: dict[str, Any] = {"sample": SAMPLE} if "tojson" in idiom else {}
    expected = theirs.apply_chat_template(
        list(CHATS[chat]),
        chat_template=IDIOMS[idiom],
        tools=tools,
        add_generation_prompt=True,
        tokenize=False,
        **values,
    )
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    # the trial at the start has no `sample`
    source = "{% if sample is defined %}" + IDIOMS[idiom] + "{% endif %}" if values else IDIOMS[idiom]
    ours = ChatTemplate(source, special, DAY)
    assert ours.render_messages(CHATS[chat], True, {"tools": tools, **values}) == expected
    assert expected


def test_without_a_date_a_template_that_does_not_require_one_works(tmp_path: Path) -> None:
    assert ChatTemplate(IDIOMS["guarded date"], {}).render("q") == "Today: 26 Jul 2024\n<|user|>q"
    asks = ChatTemplate(IDIOMS["date"], {})  # processes that render nothing load it too
    with pytest.raises(UserError, match="requires a date") as raised:
        asks.render("q")
    assert "run.date" in raised.value.todo
    write_tokenizer(tmp_path, "bytes")
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d.%m.%Y') }} {{ messages[0].content }}")
    tokens = load_tokenizer(tmp_path, DAY)
    assert tokens.decode(tokens.prompt("", "q", "", chat=True)) == "31.01.2026 q"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | tojson(nonsense=1) }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{% generation %}{{ messages[0].content }}",
        "{{ strftime_now(3) }}",
        "{{ messages[7].content }}",
        "{{ 'a'.join(5) }}",
    ],
)
def test_whatever_a_template_raises_is_a_users_error(source: str) -> None:
    with pytest.raises(UserError, match="chat template cannot be used"):
        ChatTemplate(source, {}, DAY)


def test_a_template_that_refuses_one_message_says_so_when_it_is_used() -> None:
    refusing = "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
    template = ChatTemplate(refusing, {})
    with pytest.raises(UserError) as raised:
        template.render("no")
    assert raised.value.why == "not this"


def test_all_named_tokens_of_the_configuration_are_known(tmp_path: Path) -> None:
    names = ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
    source = "".join(f"{{{{ {name}_token }}}}" for name in names)
    config: dict[str, Any] = {f"{name}_token": f"<{name}>" for name in names} | {"mask_token": {"content": "<mask>"}}
    loaded = load_chat_template(tmp_path, config | {"chat_template": source})
    assert loaded is not None and loaded.render("") == "".join(f"<{name}>" for name in names)
