"""`foray ask` and `foray chat` against a stand-in for `foray serve`: streams, errors, commands, keys."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foray.cli import main
from foray.commands.chat import ChatSession, find_model, serving_policy
from foray.watch.answers import ChatScreen
from protocol.errors import ForayError, UserError
from tests.support.fake_serve import EMMA, HOLD, PASSAGES, SEARCH, FakeServe, ends, says, searched, serving, thinks
from tests.support.waiting import wait_until

HOSTILE = "\x1b]0;title\x07\x1b[2J\u202eevil\r"
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def serve() -> Iterator[Any]:
    """`serve(steps)` starts a stand-in."""
    with ExitStack() as held:
        yield lambda *args, **kwargs: held.enter_context(serving(FakeServe(*args, **kwargs)))


def chat(monkeypatch: pytest.MonkeyPatch, url: str, *lines: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", "--url", url])


def test_the_answer_alone_is_on_stdout(serve: Any, capsys: Captured) -> None:
    server = serve()
    assert main(["ask", "Who wrote Emma?", "--url", server.url]) == 0
    out, err = capsys.readouterr()
    assert out == "Jane Austen\n"
    assert err.splitlines()[:3] == [
        "I should look it up.",
        "⌕ who wrote Emma: Emma (novel), Jane Austen",
        "It is Austen.",
    ]
    assert "emma, version 12, 1 search, " in err
    assert server.requests == [
        {
            "model": "emma",
            "stream": True,
            "messages": [{"role": "user", "content": "Who wrote Emma?"}],
            "temperature": 0.0,
        }
    ]


def test_as_json_with_passages_and_without_search(serve: Any, capsys: Captured) -> None:
    server = serve()
    assert main(["ask", "Who wrote Emma?", "--url", f"{server.url}/v1/", "--json", "--no-search"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found.pop("seconds") >= 0 and server.requests[0]["foray"] == {"search": False}
    assert found == {
        "question": "Who wrote Emma?",
        "model": "emma",
        "answer": "Jane Austen",
        "thoughts": "I should look it up.\nIt is Austen.",
        "searches": [SEARCH],
        "version": 12,
        "turns": 2,
        "cause": "",
    }


def test_searches_that_only_the_last_chunk_names_are_shown(serve: Any, capsys: Captured) -> None:
    assert main(["ask", "Q", "--url", serve([says("A"), ends(SEARCH)]).url]) == 0
    assert "⌕ who wrote Emma" in capsys.readouterr().err


def test_without_an_answer_the_exit_code_says_so_and_the_cause_is_shown(serve: Any, capsys: Captured) -> None:
    assert main(["ask", "Q", "--url", serve([thinks("hm"), ends(reason="length")]).url]) == 1
    assert "no answer: length" in capsys.readouterr().err
    assert main(["ask", "Q", "--url", serve([ends(cause="max_turns")]).url, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["cause"] == "max_turns"


STREAMS = {
    "error": ([{"error": {"message": "the engine has ended"}}], "failed: the engine has ended"),
    "cut": ([thinks("hm"), b"data: [DO"], "ended the connection before the answer was complete"),
    "text": ([b"<html>no stream</html>\n\n"], "sends no chat completion"),
    "types": ([{"choices": [{"delta": {"content": 7}}]}], "sends no chat completion"),
    "json": ([b"data: {\n\n"], "sends no chat completion"),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_stream_that_fails_is_an_error(serve: Any, capsys: Captured, case: str) -> None:
    steps, said = STREAMS[case]
    server = serve(steps)
    server.cuts = case == "cut"
    assert main(["ask", "Q", "--url", server.url]) == 1
    assert said in capsys.readouterr().err


def test_refusals_name_the_token_the_url_and_the_models(
    serve: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = secrets.token_urlsafe(32)
    server = serve(token=token)
    assert main(["ask", "Q", "--url", server.url]) == 2
    assert "its token in FORAY_SERVE_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("FORAY_SERVE_TOKEN", token)
    assert main(["ask", "Q", "--url", server.url]) == 0 and server.tokens[-1] == f"Bearer {token}"
    assert main(["ask", "Q", "--url", server.url, "--model", "gpt"]) == 2
    assert "choose one of emma-bare, emma" in capsys.readouterr().err
    for url in ("http://127.0.0.1:9", "127.0.0.1:9", "not a url"):
        assert main(["ask", "Q", "--url", url]) == 2
        assert "no model is found at" in capsys.readouterr().err
    assert main(["ask", " ", "--url", server.url]) == 2 and main(["ask", "Q", "runs/x", "--url", server.url]) == 2


def test_no_control_character_of_a_server_reaches_the_terminal(serve: Any) -> None:
    search = {"query": HOSTILE, "passages": [{"title": HOSTILE, "text": HOSTILE}], "error": HOSTILE}
    server = serve(
        [thinks(HOSTILE), searched(search), says("\x1b"), says("[2J" + HOSTILE), ends(search, cause=HOSTILE)]
    )
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, highlight=False, markup=False, width=200, legacy_windows=False)
    session, screen = ChatSession([find_model(server.url, "")]), ChatScreen(console, console)
    session.ask(HOSTILE, screen)
    session.command("/passages", screen)
    session.command(f"/{HOSTILE}", screen)
    session.endpoints *= 2
    session.ask("side by side", screen)
    shown = re.sub(r"\x1b\[(\d+;?)*m", "", file.getvalue())  # rich's styles
    shown = re.sub(r"\x1b\[(\?25[lh]|2K|1A)|\r", "", shown)  # and how it redraws the columns
    assert "\\x1b[2J" in shown and "\\u202eevil" in shown
    assert not re.search(r"[^\n\x20-\x7e⌕\u2500-\u257f…]", shown), "anything else"


def test_commands_of_a_session(serve: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = serve(), serve([says("Austen, "), says("J."), ends(version=3)])
    saved = tmp_path / "session.jsonl"
    lines = ("Who wrote Emma?", "/passages", "/search off", f"/compare {second.url}", "Who?", "/compare off", "And?")
    lines += (f"/save {saved}", f"/save {saved}", f"/save {__file__}", "/search maybe", "", "/help", "/quit", "never")
    assert chat(monkeypatch, first.url, *lines) == 1, "a file that exists is not overwritten"
    out = capsys.readouterr().out
    assert "each question stands alone" in out and "> Who wrote Emma?\nI should look it up.\n" in out
    assert f"  {PASSAGES[0]['title']} (7.25)\n  {PASSAGES[0]['text']}\n" in out
    columns = next(line for line in out.splitlines() if "Austen, J." in line)
    assert re.search(r"I should look it up\..*Austen, J\.", columns), "side by side"
    assert "emma, version 3" in out and "is no command" in out and "never" not in out
    rows = [json.loads(line) for line in saved.read_text().splitlines()]
    assert [row["question"] for row in rows] == ["Who wrote Emma?", "Who?", "And?"]
    assert [answer["answer"] for answer in rows[1]["answers"]] == ["Jane Austen", "Austen, J."]
    assert [request.get("foray") for request in first.requests] == [None, {"search": False}, {"search": False}]
    assert len(second.requests) == 1 and Path(__file__).read_text().startswith('"""')


def test_one_of_two_servers_may_fail(serve: Any, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = serve(), serve([{"error": "out of memory"}])
    assert chat(monkeypatch, first.url, f"/compare {second.url}", "Who wrote Emma?") == 1
    out = capsys.readouterr().out
    assert "Jane Austen" in out and "out of memory" in " ".join(out.replace("│", " ").split())


def test_a_model_without_a_loop_gets_the_history(serve: Any) -> None:
    server = serve()
    console = Console(file=io.StringIO())
    session = ChatSession([find_model(server.url, "", "emma-bare")])
    for question in ("Who?", "When?"):
        session.ask(question, ChatScreen(console, console))
    assert [m["content"] for m in server.requests[1]["messages"]] == ["Who?", "Jane Austen", "When?"]


@contextmanager
def typing(*words: str, **env: str) -> Iterator[tuple[int, bytearray, subprocess.Popen[bytes]]]:
    """Run `foray WORDS` in a terminal; yields its keyboard, what it shows, and the process."""
    import threading

    keyboard, terminal = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "foray", *words],
        stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True,
        preexec_fn=lambda: __import__("fcntl").ioctl(0, __import__("termios").TIOCSCTTY, 0),
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", **env},
    )  # fmt: skip
    os.close(terminal)
    shown = bytearray()

    def read() -> None:
        try:
            while data := os.read(keyboard, 4096):
                shown.extend(data)
        except OSError:
            return  # the process has closed its end

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield keyboard, shown, process
    finally:
        process.kill()
        process.wait()
        reader.join()
        os.close(keyboard)


def test_in_a_terminal_ctrl_c_stops_an_answer_and_ctrl_d_leaves(serve: Any, tmp_path: Path) -> None:
    server = serve(lambda body: EMMA if "Emma" in str(body) else [thinks("hm"), HOLD])
    with typing("chat", "--url", server.url, XDG_STATE_HOME=str(tmp_path)) as (keyboard, shown, process):

        def until(text: str, count: int = 1) -> None:
            wait_until(lambda: shown.count(text.encode()) >= count, text, said=lambda: shown.decode(errors="replace"))

        until("> ")
        # a signal between its prompt and its select() is seen by Python with the next key only
        state = Path(f"/proc/{process.pid}/stat")
        wait_until(lambda: state.read_text().rpartition(")")[2].split()[0] == "S", "it waits for a key")
        os.write(keyboard, b"\x03")
        until("Ctrl-D leaves")
        os.write(keyboard, b"Who knows?\n")
        assert server.held.wait(30)
        until("hm")
        os.write(keyboard, b"\x03")
        until("stopped")
        wait_until(lambda: server.left == 1, "the server's slot is free")
        os.write(keyboard, b"Who wrote Emma?\n")
        until("> ", 4)
        assert b"\x1b[2mI should look\x1b[0m" in shown and b"\x1b[1mJane \x1b[0m" in shown, "dim and bold"
        os.write(keyboard, b"\x04")
        assert process.wait(30) == 0
    history = tmp_path / "foray" / "chat_history"
    assert "Who knows?\nWho wrote Emma?\n" in history.read_text() and history.stat().st_mode & 0o077 == 0


def test_ctrl_c_ends_foray_ask(serve: Any) -> None:
    server = serve([thinks("hm"), HOLD])
    call = [sys.executable, "-m", "foray", "ask", "Q", "--url", server.url]
    with subprocess.Popen(call, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert server.held.wait(60)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130
    wait_until(lambda: server.left == 1, "the server's slot is free")


def stand_in(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_a_policy_is_served_for_the_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = json.dumps({"url": "http://127.0.0.1:7/v1", "models": ["x", "x-bare"], "token": "made"})
    script = f"echo \"$@\" > {tmp_path}/words; echo starting >&2; echo '{told}'\n"
    script += f"cat; touch {tmp_path}/ended"
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path / "python", script))
    with serving_policy("runs/x", ["engine.kind.threads=2"]) as served:
        assert served == ("http://127.0.0.1:7/v1", "made") and not (tmp_path / "ended").exists()
    assert (tmp_path / "ended").exists()
    assert (
        tmp_path / "words"
    ).read_text() == "-m foray serve runs/x engine.kind.threads=2 --port 0 --json --until-stdin-ends\n"


def test_a_policy_that_cannot_be_served_ends_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "executable", stand_in(tmp_path / "python", "echo loading >&2; exit 2"))
    with pytest.raises(ForayError, match="exit code 2"), serving_policy("runs/x", []):
        pass
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no policy is given"), serving_policy(None, []):
        pass


def test_an_unwritable_state_folder_costs_the_history_only(serve: Any) -> None:
    with typing("chat", "--url", serve().url, XDG_STATE_HOME="/proc/none") as (keyboard, shown, process):
        wait_until(lambda: b"> " in shown, "the prompt", said=shown.decode)
        assert b"no history of questions is kept" in shown
        os.write(keyboard, b"/quit\n")
        assert process.wait(30) == 0
