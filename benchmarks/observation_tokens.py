"""Compare the token ids of observations with the encoding in the original code.

    python -m benchmarks.observation_tokens --model DIR --passages corpus.jsonl

`--model` is a directory with a `tokenizer.json`; no weights are read. Search-R1 (`generation.py`, a14dc3a) and ReSearch
(`vllm_rollout.py`, 4bdb872) encode an observation as one text with the model's tokenizer. This script builds and
encodes that text independently of `rollout_server`, and compares the ids for random sets of passages.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path

from protocol.errors import UserError
from protocol.search import Passage
from rollout_server.environment.actions import escape_tags
from rollout_server.environment.config import EnvironmentSettings
from rollout_server.environment.environment import Environment, build_environment


def search_r1(contents: Sequence[str]) -> str:
    """Return the observation of Search-R1: title line and rest of each document, numbered from 1."""
    text = ""
    for number, document in enumerate(contents, 1):
        title, *rest = document.split("\n")
        text += f"Doc {number}(Title: {title}) " + "\n".join(rest) + "\n"
    return f"\n\n<information>{text.strip()}</information>\n\n"


def research(contents: Sequence[str]) -> str:
    """Return the observation of ReSearch: unchanged documents, separated by an empty line."""
    return " <result>\n" + "\n\n".join(contents).strip() + "\n</result>"


ORIGINALS: dict[str, tuple[str, int, int, Callable[[Sequence[str]], str]]] = {
    "search_r1": ("search_r1", 3, 500, search_r1),
    "research": ("research_base", 5, 8192, research),
}
"""Name -> template, passages per search, maximum tokens of an observation, the original's text."""
_DAY = date(2026, 1, 31)
"""Date for chat templates that contain one; observations do not depend on it."""


def compare(
    environment: Environment, contents: Sequence[str], limit: int, original: Callable[[Sequence[str]], str]
) -> str:
    """Return how one observation's ids compare with the original's: equal, cut, escaped or different.

    cut      the original is longer than `limit`, and Foray's equals it up to the closing tag
    escaped  a passage contains a protocol tag or a control token: Foray's equals the original's text over the escaped
             passages, which contain no control token, complete or cut
    """
    ours = environment.observation([Passage(contents=document) for document in contents], limit)
    theirs = environment.tokenizer.encode_trusted(original(contents))
    if fits := _alike(ours, theirs, limit, environment):
        return fits
    harmless = environment.tokenizer.encode_untrusted(original([escape_tags(document) for document in contents]))
    return "escaped" if _alike(ours, harmless, limit, environment) else "different"


def _alike(ours: Sequence[int], theirs: Sequence[int], limit: int, environment: Environment) -> str:
    if ours == theirs:
        return "equal"
    cut = [*theirs[: limit - len(environment.after)], *environment.after]
    return "cut" if len(theirs) > limit and ours == cut else ""


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON object per original. Return 1 if an observation differs for an unknown reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="directory with a tokenizer.json")
    parser.add_argument("--passages", type=Path, required=True, help='JSON lines with "contents"')
    parser.add_argument("--count", type=int, default=1000, help="observations per original (default: 1000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    lines = args.passages.read_text(encoding="utf-8").splitlines()
    corpus = [str(json.loads(line)["contents"]) for line in lines if line.strip()]
    different = 0
    for name, (template, topk, limit, original) in ORIGINALS.items():
        given = EnvironmentSettings(template=template, max_obs_tokens=limit, max_context=8704)
        try:
            environment = build_environment(given, args.model, day=_DAY)
        except UserError as error:
            print(error.render(), file=sys.stderr)
            return 2
        draw = random.Random(args.seed)
        found = Counter(compare(environment, draw.sample(corpus, topk), limit, original) for _ in range(args.count))
        different += found["different"]
        print(json.dumps({"original": name, "observations": args.count, **dict(sorted(found.items()))}))
    changed = sum(escape_tags(document) != document for document in corpus)
    print(json.dumps({"passages": len(corpus), "changed": changed}))
    return 1 if different else 0


if __name__ == "__main__":
    raise SystemExit(main())
