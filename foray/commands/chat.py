"""Ask a trained policy questions in the terminal: `foray ask` one, `foray chat` as many as you type.

POLICY is what `foray serve` serves, the latest run below ./runs by default. It is started for this command and stopped
at the end. --url asks a running `foray serve` instead, or another OpenAI-compatible endpoint. Thoughts are dim, each
search is one line, the answer is bold. `foray ask` prints the answer to stdout and the rest to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foray.commands.serve import TOKEN
from foray.watch.answers import ChatAnswer, ChatChunk, ChatEndpoint, ChatScreen, one_line, search_line, side_by_side
from protocol.errors import ForayError, UserError
from protocol.redaction import for_terminal
from protocol.runtime.files import atomic_write
from protocol.runtime.http.auth import read_secret
from protocol.runtime.http.body import error_text, message_of

if TYPE_CHECKING:
    from rich.console import Console

SILENCE_S = 600.0
"""A server that sends nothing for this long, no comment either, has failed."""
KEPT = 1000
"""Lines of the history of questions."""
HELP = """/passages              show the passages of the last answer
/search on|off         let searches find passages, or nothing
/compare URL [MODEL]   ask a second `foray serve` too, side by side; /compare off ends it
/save FILE             write questions, answers and passages so far as JSON lines
/help                  show this
/quit                  leave, as Ctrl-D does; Ctrl-C stops an answer"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `foray ask` and of `foray chat`: the program's name says which."""
    asks = parser.prog.endswith(" ask")
    parser.set_defaults(asks=asks, question="", json=False)
    if asks:
        parser.add_argument("question", help="the question; - reads it from standard input")
        parser.add_argument("--json", action="store_true", help="print one JSON object, with searches and passages")
    else:
        parser.epilog = f"in a session:\n{HELP}"
    parser.add_argument("policy", nargs="?", metavar="POLICY", help="run, checkpoint, export or model folder to serve")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings for what is started")
    parser.add_argument("--url", default="", help="ask this running `foray serve` instead of starting one")
    parser.add_argument("--model", default="", help="model at the endpoint (default: the first with a search loop)")
    parser.add_argument("--temperature", type=float, default=0.0, help="default: 0, greedy")
    parser.add_argument("--no-search", action="store_true", help="answer without searching")


def run(args: argparse.Namespace) -> int:
    """Return 0 after an answer, 1 without one, 130 after Ctrl-C. Raises UserError, ForayError."""
    if args.url and args.policy:
        raise UserError(f"both {args.policy} and --url are given", todo="give one of them")
    question = sys.stdin.read().strip() if args.question == "-" else args.question.strip()
    if args.asks and not question:
        raise UserError("the question is empty", todo='foray ask "Who wrote Emma?"')
    given = nullcontext((args.url, read_secret(os.environ, TOKEN)))
    with given if args.url else serving_policy(args.policy, args.overrides) as (url, token):
        session = ChatSession([find_model(url, token, args.model)], not args.no_search, args.temperature)
        return _ask(session, question, args.json) if args.asks else _chat(session)


@contextmanager
def serving_policy(policy: str | None, overrides: list[str]) -> Iterator[tuple[str, str]]:
    """Run `foray serve` on a free port inside the block; yields its URL and token.

    Raises UserError, or ForayError if it ends.
    """
    from deploy.run.run_dir import latest

    where = policy or latest()
    if where is None:
        raise UserError("no policy is given, and ./runs contains no run", todo="name one, or give --url")
    words = ["serve", str(where), *overrides, "--port", "0"]
    print(for_terminal(f"starting {shlex.join(['foray', *words])}"), file=sys.stderr, flush=True)
    call, pipe = [sys.executable, "-m", "foray", *words, "--json", "--until-stdin-ends"], subprocess.PIPE
    # a new session: Ctrl-C stops an answer, not the server, which ends with this process
    with subprocess.Popen(call, stdin=pipe, stdout=pipe, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise ForayError(f"`foray serve` ended before it was ready, with exit code {process.wait()}")
        told = json.loads(line)
        yield told["url"], told.get("token") or read_secret(os.environ, TOKEN)


def find_model(url: str, token: str, model: str = "") -> ChatEndpoint:
    """Return the model of that name at an endpoint, else the first with a search loop. Raises UserError."""
    from http.client import HTTPException

    from protocol.runtime.http.client import ask, read_json

    base = re.sub(r"(/v1)?/*$", "/v1", url, count=1)
    try:
        with ask(f"{base}/models", timeout_s=10.0, token=token) as response:
            cards = read_json(response)["data"]
        loops = {str(card["id"]): bool((card.get("foray") or {}).get("loop")) for card in cards}
        chosen = model or max(loops, key=lambda name: loops[name])
    except (OSError, HTTPException, ValueError, LookupError, TypeError, AttributeError) as error:
        todo = f"give the URL that `foray serve` printed, and its token in {TOKEN}; or POLICY, which starts one"
        raise UserError(f"no model is found at {base}", why=str(error)[:200], todo=todo) from None
    if chosen not in loops:
        raise UserError(f"{base} has no model {model!r}", todo=f"choose one of {', '.join(loops)}")
    return ChatEndpoint(base, chosen, loops[chosen], token)


async def stream(endpoint: ChatEndpoint, options: dict[str, Any], take: Callable[[ChatChunk], object]) -> None:
    """Ask for one answer; `take` gets its chunks. A cancellation closes the connection, which frees the server's slot.

    options: other fields of the request, messages included
    Raises UserError if the server refuses, ForayError if it fails or does not answer.
    """
    import aiohttp
    from pydantic import ValidationError

    from protocol.runtime.http.body import bounded_session
    from rollout_server.engine.base import EngineError
    from rollout_server.engine.decoding import SseParser

    body = {"model": endpoint.model, "stream": True, **options}
    events, silence = SseParser(endpoint.url), aiohttp.ClientTimeout(total=None, sock_read=SILENCE_S)
    headers = {"Authorization": f"Bearer {endpoint.token}"} if endpoint.token else {}
    try:
        async with (
            bounded_session(headers=headers, timeout=silence) as session,
            session.post(f"{endpoint.url}/chat/completions", json=body, allow_redirects=False) as response,
        ):
            if response.status != 200:
                raw = await response.content.read(1000)
                why = error_text(raw, raw.decode(errors="replace")[:200])
                raise UserError(f"{endpoint.url} refuses, with HTTP status {response.status}", why=why)
            async for data in response.content.iter_any():
                for payload in events.feed(data):
                    if payload == b"[DONE]":
                        return
                    chunk = ChatChunk.model_validate_json(payload)
                    if chunk.error is not None:
                        raise ForayError(f"{endpoint.url} failed: {message_of(chunk.error)}")
                    take(chunk)
        raise ForayError(f"{endpoint.url} ended the connection before the answer was complete")
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ForayError(f"{endpoint.url} does not answer: {str(error) or type(error).__name__}") from None
    except (EngineError, ValidationError) as error:
        raise ForayError(f"{endpoint.url} sends no chat completion: {str(error)[:200]}") from None


@dataclass
class ChatSession:
    """Questions and answers. A model without a loop gets its earlier answers as history."""

    endpoints: list[ChatEndpoint]
    search: bool = True
    temperature: float = 0.0
    asked: list[tuple[str, list[ChatAnswer]]] = field(default_factory=list)
    saved: set[Path] = field(default_factory=set)

    def ask(self, question: str, screen: ChatScreen) -> list[ChatAnswer]:
        """Print the answers and return them. Raises ForayError, and KeyboardInterrupt after Ctrl-C."""
        answers = [ChatAnswer(endpoint) for endpoint in self.endpoints]
        self.asked.append((question, answers))
        one = len(answers) == 1
        try:
            asyncio.run(self._one(answers[0], question, screen.show) if one else self._all(answers, question, screen))
        finally:
            screen.end()
        if one:
            problem = answers[0].problem()
            screen.line("problem" if problem else "note", problem or answers[0].footer())
        return answers

    async def _one(self, answer: ChatAnswer, question: str, show: Callable[[str, Any], object]) -> None:
        began = time.monotonic()
        options = self._options(answer.endpoint, question)
        answer.end.cause = "stopped"  # unless it comes to its end
        try:
            await stream(answer.endpoint, options, lambda chunk: [show(*part) for part in answer.take(chunk)])
        except ForayError as error:
            answer.end.cause = str(error)
            raise
        finally:
            answer.seconds = time.monotonic() - began

    async def _all(self, answers: list[ChatAnswer], question: str, screen: ChatScreen) -> None:
        from rich.live import Live

        try:
            with Live(side_by_side(answers), console=screen.answers, transient=True) as live:

                async def one(answer: ChatAnswer) -> None:
                    with suppress(ForayError):  # its column shows it
                        await self._one(answer, question, lambda *_: live.update(side_by_side(answers)))

                await asyncio.gather(*map(one, answers))
        finally:
            screen.answers.print(side_by_side(answers))

    def _options(self, endpoint: ChatEndpoint, question: str) -> dict[str, Any]:
        """Return the rest of a request. A model without a loop gets the questions and answers before."""
        before = [] if endpoint.loop else self.asked[:-1]
        said = [(q, answer.text()) for q, answers in before for answer in answers if answer.endpoint == endpoint]
        turns = [(role, text) for q, a in said if a for role, text in (("user", q), ("assistant", a))]
        messages = [{"role": role, "content": text} for role, text in [*turns, ("user", question)]]
        without = {} if self.search else {"foray": {"search": False}}
        return {"messages": messages, "temperature": self.temperature, **without}

    def command(self, line: str, screen: ChatScreen) -> bool:
        """Carry out `/NAME ...`; return whether the session goes on. Raises UserError, OSError."""
        name, _, rest = line[1:].partition(" ")
        rest = rest.strip()
        if name in ("quit", "exit"):
            return False
        if name == "passages":
            self._passages(screen)
        elif name == "search" and rest in ("on", "off"):
            self.search = rest == "on"
            screen.line("note", f"search is {rest}")
        elif name == "compare" and rest:
            url, _, model = rest.partition(" ")
            self.endpoints[1:] = [] if url == "off" else [find_model(url, read_secret(os.environ, TOKEN), model)]
            screen.line("note", "asking " + one_line(" and ".join(f"{e.model} at {e.url}" for e in self.endpoints)))
        elif name == "save" and rest:
            path = Path(rest).expanduser()
            if path.exists() and path not in self.saved:
                raise UserError(f"{path} exists", todo="give another name")
            rows = ({"question": asked, "answers": [one.to_json() for one in answers]} for asked, answers in self.asked)
            text = "".join(f"{json.dumps(row)}\n" for row in rows)
            atomic_write(path, text, durable=False)
            self.saved.add(path)
            screen.line("note", f"questions in {for_terminal(rest)}: {len(self.asked)}")
        else:
            unknown = "" if name == "help" else f"{one_line(line)} is no command\n"
            screen.line("note", unknown + HELP)
        return True

    def _passages(self, screen: ChatScreen) -> None:
        found = [search for answer in (self.asked[-1][1] if self.asked else []) for search in answer.searches]
        for search in found:
            screen.line("search", search_line(search))
            for passage in search.passages:
                score = "" if passage.score is None else f" ({passage.score:.3g})"
                screen.line("answer", f"  {one_line(passage.title)}{score}")
                screen.line("note", f"  {one_line(passage.text)}")
        if not found:
            screen.line("note", "the last answer has no searches")


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def _ask(session: ChatSession, question: str, as_json: bool) -> int:
    """Answer one question: the answer goes to stdout, thoughts and searches to stderr."""
    notes = _console(stderr=True)
    (answer,) = session.ask(question, ChatScreen(notes if as_json else _console(), notes))
    if as_json:
        print(json.dumps({"question": question} | answer.to_json()))
    return 1 if answer.problem() else 0


def _chat(session: ChatSession) -> int:
    """Read lines until the input ends. Return 1 if the input is no terminal and a question was not answered."""
    console = _console()
    screen, typed, failed = ChatScreen(console, console), sys.stdin.isatty(), False
    endpoint = session.endpoints[0]
    alone = "; each question stands alone" if endpoint.loop else ""
    screen.line("note", f"{one_line(endpoint.model)} at {one_line(endpoint.url)}{alone}; /help shows the commands")
    with _history() if typed else nullcontext():
        for line in filter(None, _typed() if typed else map(str.strip, sys.stdin)):
            if not typed:
                screen.line("note", f"> {for_terminal(line)}")
            try:
                if not line.startswith("/"):
                    failed |= any(answer.problem() for answer in session.ask(line, screen))
                elif not session.command(line, screen):
                    break
            except KeyboardInterrupt:
                if not typed:
                    raise
                screen.line("note", "stopped")
            except (ForayError, OSError) as error:
                failed = True
                known = error if isinstance(error, UserError) else UserError(str(error))
                screen.line("problem", known.render())
    return int(failed and not typed)


def _typed() -> Iterator[str]:
    """Yield the lines that are typed, until Ctrl-D."""
    while True:
        try:
            yield input("> ").strip()
        except KeyboardInterrupt:
            print("\nCtrl-D leaves")
        except EOFError:
            print()
            return


@contextmanager
def _history() -> Iterator[None]:
    """Edit lines, and keep the history of questions for later sessions, readable to this user only."""
    import readline

    home = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = home / "foray" / "chat_history"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.touch(mode=0o600)
        readline.read_history_file(path)
    except OSError as error:
        print(for_terminal(f"no history of questions is kept: {error}"), file=sys.stderr)
        yield
        return
    readline.set_history_length(KEPT)
    try:
        yield
    finally:
        readline.write_history_file(path)
