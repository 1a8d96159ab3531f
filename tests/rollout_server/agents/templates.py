"""Small chat templates in the style of each format: what the renderer meets in published ones."""

from __future__ import annotations

_IM = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
_TOOLS = "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
_GENERATE = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
_RESULT = "<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
_HERMES = (
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
)
_XML = (
    "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)


def _qwen(call: str, thoughts: str = "", generate: str = _GENERATE) -> str:
    said = f"<|im_start|>assistant\n{thoughts}{{{{ m.content }}}}"
    calls = f"{{% for c in m.tool_calls or [] %}}\n{call}{{% endfor %}}<|im_end|>\n"
    return (
        f"{_TOOLS}{{% for m in messages %}}{{% if m.role == 'tool' %}}{_RESULT}{{% elif m.role == 'assistant' %}}"
        f"{said}{calls}{{% else %}}{_IM}{{% endif %}}{{% endfor %}}{generate}"
    )


_LAST = (
    "{% set ns = namespace(q=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.q = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_KEPT = "{% if loop.index0 > ns.q and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_THINK = "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
HERMES = _qwen(_HERMES)
XML = _qwen(_XML)
DROPS_THOUGHTS = _LAST + _qwen(_HERMES, _KEPT)
KEEPS_THOUGHTS = _qwen(_XML, "<think>\n{{ m.reasoning_content }}\n</think>\n\n", _THINK)
LLAMA = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>\n\n"
    "{{ m.content | tojson }}<|eot_id|>{% elif m.tool_calls %}{% if m.tool_calls | length > 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": {{ m.tool_calls[0].function.arguments | tojson }}}'
    "<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{% if loop.first and tools %}"
    "{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}{{ m.content | trim }}<|eot_id|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_NEMO_CALL = (
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{{ ', ' if not loop.last }}"
)
MOVES_TOOLS = (
    "{{ bos_token }}{% set u = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if tools and m == u[-1] %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]"
    "{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS]"
    '{"content": {{ m.content | tojson }}'
    ', "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}'
    f"{_NEMO_CALL}{{% endfor %}}]</s>{{% else %}}{{{{ m.content }}}}</s>{{% endif %}}{{% endfor %}}"
)
CHANNELS = (
    "{% for t in tools or [] %}<|start|>developer<|message|>{{ t | tojson }}<|end|>{% endfor %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|start|>functions.{{ m.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.tool_calls %}<|start|>assistant{% if m.thinking %}<|channel|>analysis"
    "<|message|>{{ m.thinking }}<|end|><|start|>assistant{% endif %} to=functions.{{ m.tool_calls[0].function.name }}"
    "<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
NEXT_ROLE_ENDS = (
    "{% for t in tools or [] %}<|system|>\n{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.role == 'tool' %}"
    "<|observation|>\n{{ m.content }}{% elif m.role == 'assistant' %}<|assistant|>\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>{{ c.function.name }}\n"
    "{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}{% else %}"
    "<|user|>\n{{ m.content }}{% endif %}{% endfor %}{{ '<|assistant|>\n' if add_generation_prompt }}"
)
NO_TOOLS = "{% for m in messages %}" + _IM + "{% endfor %}" + _GENERATE
NO_CALLS = _TOOLS + NO_TOOLS
STRANGE_CALLS = _qwen(
    "<call>{{ c.function.name }}({% for k, v in c.function.arguments.items() %}{{ k }}~{{ v }} {% endfor %})"
)
REWRITES = _qwen(_HERMES).replace(
    "{{ m.content }}\n</tool_response>", "{{ m.content }} of {{ messages | length }}\n</tool_response>"
)
EOT: tuple[str, ...] = ("<|eot_id|>", "<|eom_id|>")
IM: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
EOS: tuple[str, ...] = ("</s>",)
CALL: tuple[str, ...] = ("<|return|>", "<|call|>")
ROLE: tuple[str, ...] = ("<|user|>", "<|observation|>")
APPENDED: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": (HERMES, IM),
    "xml": (XML, IM),
    "keeps thoughts": (KEEPS_THOUGHTS, IM),
    "llama": (LLAMA, EOT),
    "next role ends": (NEXT_ROLE_ENDS, ROLE),
}
"""Templates that append a message of the user too."""
IN_CYCLE: dict[str, tuple[str, tuple[str, ...]]] = {
    "drops thoughts": (DROPS_THOUGHTS, IM),
    "moves tools": (MOVES_TOOLS, EOS),
    "channels": (CHANNELS, CALL),
}
"""Templates that append results of tools, and write a conversation anew for a message of the user."""
