"""An agent as a command that does what agents do wrong; its key says what. The argument is a folder for notes."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

URL, KEY = os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}
Messages = list[dict[str, Any]]


def post(path: str, body: Any, retry: int = 0, timeout_s: float | None = None) -> Any:
    headers = {"Authorization": f"Bearer {KEY}", "x-stainless-retry-count": str(retry)}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=timeout_s) as response:
        return json.load(response)


def chat(messages: Messages, **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "tools": [SEARCH]}
    message: dict[str, Any] = post("/chat/completions", body, **options)["choices"][0]["message"]
    return message


def plain(messages: Messages, before: Callable[[Messages], object] = lambda messages: None) -> str:
    """Search until the policy answers. `before` is called before each call."""
    while True:
        before(messages)
        said = chat(messages)
        messages.append(said)
        if not said.get("tool_calls"):
            return str(said["content"])
        for call in said["tool_calls"]:
            found = post("/search", json.loads(call["function"]["arguments"]))
            text = " ".join(f"( {passage['title']} ) {passage['text']}" for passage in found["passages"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})


def edits(messages: Messages) -> str:
    """Change the question before each call."""

    def edit(messages: Messages) -> None:
        messages[0] = {"role": "user", "content": messages[0]["content"] + " ?"}

    return plain(messages, edit)


def retries(messages: Messages) -> str:
    """Give up on the first call at once, and repeat it as the clients of OpenAI do."""
    try:
        chat(messages, timeout_s=0.001)
    except OSError:
        said = chat(messages, retry=1)
        assert chat(messages, retry=2) == said
    return plain(messages)


def killed(messages: Messages) -> str:
    """End in the middle of a call."""
    threading.Thread(target=chat, args=(messages,), daemon=True).start()
    time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGTERM)
    return ""


def hangs(messages: Messages) -> str:
    """Do not end after a call."""
    chat(messages)
    time.sleep(3600)
    return ""


def garbage(messages: Messages) -> str:
    """Print no result."""
    chat(messages)
    print("{")
    sys.exit(0)


def late(messages: Messages) -> str:
    """Leave a process that calls when the trajectory is over, and notes the status."""
    answer = plain(messages)
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.close(1), os.close(2)
        while True:
            try:
                post("/search", {"query": ""})
                time.sleep(0.05)
            except urllib.error.HTTPError as error:
                (Path(sys.argv[1]) / f"late-{os.getpid()}").write_text(str(error.code))
                os._exit(0)
    return answer


KINDS = (plain, plain, edits, retries, killed, hangs, garbage, late)

if __name__ == "__main__":
    kind = KINDS[hashlib.sha256(KEY.encode()).digest()[0] % len(KINDS)]
    (Path(sys.argv[1]) / f"{kind.__name__}-{os.getpid()}").touch()
    print(json.dumps({"answer": kind([{"role": "user", "content": os.environ["FORAY_QUESTION"]}])}))
