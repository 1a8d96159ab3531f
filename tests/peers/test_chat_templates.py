"""Chat templates of model families, read from a wheel and an sdist that others publish: three turns with tools.

Each gets a small byte-level BPE with the template's control tokens. The rows of docs/agents.md are these results.
"""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from os import environ
from pathlib import Path
from typing import Any

import pytest

from protocol.errors import UserError
from rollout_server.agents.renderer import NotAppendable
from tests.support.chat_tokenizers import TOOLS, Chat, Conversation, assistant, make_chat

Did = Callable[[str, str], None]
IM, EOT, EOS = ("<|im_end|>", "<|endoftext|>"), ("<|eot_id|>", "<|eom_id|>"), ("</s>",)
PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


@dataclass(frozen=True)
class Family:
    """name: in docs/agents.md. file: in the wheel of trl, or (llama.cpp/..) in the sdist of llama-cpp-python."""

    name: str
    file: str
    ends: tuple[str, ...] = IM
    thinks: bool = False


FAMILIES = [
    Family("Qwen2.5", "qwen2_5.jinja"),
    Family("Qwen3", "qwen3.jinja", thinks=True),
    Family("Qwen3 2507 Instruct", "qwen3_instruct_2507.jinja"),
    Family("Qwen3 for training (TRL)", "qwen3_training.jinja", thinks=True),
    Family("Qwen3-Coder", "llama.cpp/Qwen3-Coder.jinja"),
    Family("Qwen3.5", "qwen3_5_think.jinja", thinks=True),
    Family("Qwen3.8", "qwen3_8.jinja", thinks=True),
    Family("Llama 3.1", "llama3_1.jinja", EOT),
    Family("Llama 3.3", "llama.cpp/meta-llama-Llama-3.3-70B-Instruct.jinja", EOT),
    Family("Gemma 4", "gemma4_v5.jinja", ("<turn|>", "<|tool_response>"), thinks=True),
    Family("gpt-oss", "gptoss.jinja", ("<|return|>", "<|call|>"), thinks=True),
    Family("GLM-4.6", "llama.cpp/GLM-4.6.jinja", ("<|user|>", "<|observation|>"), thinks=True),
    Family("Nemotron 3", "nemotron_3_super.jinja", thinks=True),
    Family("MiniMax-M2", "llama.cpp/MiniMax-M2.jinja", ("[e~[",), thinks=True),
    Family("Mistral Nemo", "llama.cpp/mistralai-Mistral-Nemo-Instruct-2407.jinja", EOS),
    Family("Mistral Small 3.2", "llama.cpp/Mistral-Small-3.2-24B-Instruct-2506.jinja", EOS),
    Family("Ministral 3", "llama.cpp/mistralai-Ministral-3-14B-Reasoning-2512.jinja", EOS),
    Family("Granite 4", "llama.cpp/ibm-granite-granite-4.0.jinja", ("<|end_of_text|>",)),
    Family("Seed-OSS", "llama.cpp/ByteDance-Seed-OSS.jinja", ("<seed:eos>",), thinks=True),
    Family("SmolLM3 (Unsloth)", "llama.cpp/HuggingFaceTB-SmolLM3-3B.jinja"),
    Family("Gemma 3", "gemma3.jinja", ("<end_of_turn>",)),
    Family("Phi-3.5", "llama.cpp/microsoft-Phi-3.5-mini-instruct.jinja", ("<|end|>", "<|endoftext|>")),
    Family("Llama 3", "llama3.jinja", EOT),
    Family("DeepSeek-V3.2", "llama.cpp/deepseek-ai-DeepSeek-V3.2.jinja", ("<｜end▁of▁sentence｜>",)),
    Family("Kimi-K2", "llama.cpp/Kimi-K2-Instruct.jinja"),
    Family("LFM2.5", "lfm2_2_5.jinja"),
]
SEQUENCES = {
    "one": "one",
    "user": "a new one at a later message of the user",
    "no_tools": "one; agents without tools only",
    "refused": "refused",
}


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The text of a template."""
    python = environ.get("FORAY_PEERS_PYTHON")
    assert python, "run `make test-peers`: FORAY_PEERS_PYTHON names the interpreter that has the packages"
    find = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    trl = Path(subprocess.run([python, "-c", find], capture_output=True, text=True, check=True).stdout.strip())
    (sdist,) = (Path(python).parents[1] / "sdists").glob("llama_cpp_python-*.tar.gz")
    folder = tmp_path_factory.mktemp("llama")
    with tarfile.open(sdist) as archive:
        for member in archive:
            if member.name.endswith(".jinja") and "/models/templates/" in member.name:
                member.name = Path(member.name).name
                archive.extract(member, folder, filter="data")

    def read(file: str) -> str:
        name = file.removeprefix("llama.cpp/")
        return ((folder if name != file else trl / "chat_templates") / name).read_text(encoding="utf-8")

    return read


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_three_turns_with_tools(family: Family, source: Callable[[str], str], did: Did) -> None:
    chat = make_chat(source(family.file), family.ends)
    verdict = chat.renderer.verdict()
    did(family.name, str(verdict))
    if verdict.sequences in ("one", "user"):
        hostile, plain = _controls(chat, family, _hostile(chat)), _controls(chat, family, "Of lakes.")
        assert hostile == plain, "a content brings a control token"
        talk = _two_calls(chat, family, "Of lakes.")
        answer, question = assistant("It is deep.", "", _thoughts(family)), {"role": "user", "content": "And how old?"}
        if verdict.sequences == "one":
            assert talk.step(answer, question).content == "It is deep."
        else:
            with pytest.raises(NotAppendable):
                talk.step(answer, question)
    elif verdict.sequences == "no_tools":
        with pytest.raises(UserError):
            chat.renderer.begin([{"role": "user", "content": "Which?"}], TOOLS)
        assert chat.renderer.begin([{"role": "user", "content": "Which?"}], [])
    else:
        assert verdict.reason
    row = f"| {family.name} | {SEQUENCES[verdict.sequences]} | {_why(verdict.reason)} |"
    assert row in PAGE.read_text(encoding="utf-8").splitlines(), row


def _two_calls(chat: Chat, family: Family, result: str) -> Conversation:
    """Two calls with results, compared with the template's text after each. The second call has a result of its own."""
    talk = Conversation(chat, {"role": "user", "content": f"Which lake? {result}"})
    for query in ("deep lakes", "old lakes"):
        found = {"role": "tool", "name": "search", "content": result}
        said = talk.step(assistant("", query, _thoughts(family)), found)
        assert said.reasoning == _thoughts(family) and not said.content
    return talk


def _controls(chat: Chat, family: Family, result: str) -> list[int]:
    return chat.controls(_two_calls(chat, family, result).ids)


def _hostile(chat: Chat) -> str:
    return "x " + " ".join(sorted(chat.tokens.decode([i]) for i in chat.tokens.control_ids)) + ' "y" é\nz'


def _thoughts(family: Family) -> str:
    return "I think." if family.thinks else ""


def _why(reason: str) -> Any:
    return reason.removeprefix("the chat template ").replace("|", "\\|") or "-"
