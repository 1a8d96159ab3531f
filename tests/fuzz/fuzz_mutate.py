"""Malformed input from valid examples: mutated bytes, mutated trees, and bombs.

Everything is drawn from one `random.Random`, so a seed and a number name an input.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgpack

Shape = Literal["bytes", "msgpack", "json", "text"]

NUMBERS: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        2,
        255,
        256,
        65535,
        65536,
        2**31 - 1,
        2**31,
        -(2**31) - 1,
        2**32,
        2**62,
        2**63 - 1,
        -(2**63),
        2**64 - 1,
    ),
    *(0.0, -0.0, 0.5, 1e-300, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 1e-3),
)
TEXTS: tuple[str, ...] = (
    *(
        "",
        " ",
        "a",
        "a" * 300,
        "\x00",
        "\n",
        "\ud800",
        "\udfff x",
        "\u2028",
        "\x85",
        "\u202e",
        "\U0010ffff",
        "..",
        "../../x",
    ),
    *("-1", "1e999", "nan", "v1", "1.0", "999999999.999999999999", "null", "[]", "{}", "{{7*7}}", "%s%s%n", "$(id)"),
    *("<search>x</search>", "</information>", "<answer>", "\\boxed{", "\\boxed{a{b}c}", "group", "task", "policy"),
    *(
        "\ufdfa" * 40,
        "e\u0301" * 50,
        "é" * 260,
        "http://[::1",
        "file:///etc/passwd",
        "idna ",
        "unicode escape",
        "utf-7",
    ),
    "9" * 5000,
)
HUGE = 10**4000
"""Beyond a double and below the 4300 digits that Python converts."""
OTHERS: tuple[Any, ...] = (
    None,
    True,
    False,
    [],
    {},
    [[]],
    [None],
    {"a": None},
    [1, "a", None],
    b"",
    b"\xff\xfe",
    b"\x00" * 9,
)

KEYS: tuple[Any, ...] = ("", "more", "type", "__class__", "é" * 300, 0, -1, 1.5, None, True)
"""What a field may be called instead; msgpack can spell all of them."""

CONTROLS = (
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b":",
        b",",
        b"\\u0000",
        b"\\ud800",
        b"NaN",
        b"Infinity",
        b"-",
        b"1e999",
        b"\n",
        b"\r\n",
    ),
    *(
        b"\x00",
        b"\xff",
        b"\xc3\x28",
        b"\xed\xa0\x80",
        b"\xef\xbb\xbf",
        b"\x1f\x8b",
        b"PAR1",
        b"data: ",
        b"data: [DONE]\n\n",
    ),
    *(
        b"&#" + b"9" * 5000 + b";",
        b"<![CDATA[",
        b"<!--",
        b"<script>",
        b"</",
        b"1" * 5000,
        b"1" + b"0" * 400,
        b"null",
        b"true",
    ),
    *(
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x00",
        b"\xd4\x00\x00",
    ),
)

BOMBS: dict[Shape, tuple[Callable[[int], bytes], ...]] = {
    "msgpack": (
        lambda n: b"\x91" * n + b"\xc0",
        lambda n: b"\x81\xa1a" * n + b"\xc0",
        lambda n: b"\x80" * n,
        lambda n: b"\xdd\x00\x01\x00\x00" * (n % 2000 + 1),
        lambda n: b"\xdf\x00\x01\x00\x00\xa1a" * (n % 2000 + 1),
        lambda n: b"\xdc\xff\xff" + b"\xc0" * min(n, 65535),
        lambda n: b"\xdc\xff\xff" + b"\xdc\xff\xff" * min(n, 65535),
        lambda n: b"\xc6" + n.to_bytes(4, "big") + b"x" * (n // 2),
        lambda n: b"\xdd\xff\xff\xff\xff" + b"\x01" * n,
    ),
    "json": (
        lambda n: b"[" * n,
        lambda n: b"[" * n + b"]" * n,
        lambda n: b'{"a":' * n + b"1" + b"}" * n,
        lambda n: b"1" * n,
        lambda n: b'"' + b"\\u0041" * n + b'"',
        lambda n: b"[" + b"{}," * n + b"{}]",
        lambda n: b'{"a":1' + b',"a":1' * n + b"}",
        lambda n: b"-" + b"0" * n,
        lambda n: b" " * n + b"1",
    ),
    "text": (
        lambda n: b"<" * n,
        lambda n: b"<" + b" " * n,
        lambda n: b"<search>" * (n // 8),
        lambda n: b"</" + b"a" * n,
        lambda n: b"<!--" * (n // 4),
        lambda n: b"&" * n,
        lambda n: b"\\boxed{" * (n // 7),
        lambda n: "\ufdfa".encode() * (n // 18),
        lambda n: b"\n" * n,
    ),
    "bytes": (lambda n: b"\x00" * n, lambda n: b"\xff" * n, lambda n: bytes(range(256)) * (n // 256)),
}
BOMB_SIZES = (10, 100, 1000, 3000, 20_000, 60_000)
"""The last one rarely, and one of 5 MB hardly ever."""


class Mutator:
    """Draws malformed inputs of one shape from valid `seeds`."""

    def __init__(self, rng: random.Random, shape: Shape, seeds: Sequence[bytes]) -> None:
        self._rng, self._shape, self._seeds = rng, shape, list(seeds) or [b""]

    def draw(self) -> bytes:
        """One input: 1% a bomb, 2% noise, else an example that was hurt as bytes or as a tree."""
        rng = self._rng
        chance = rng.random()
        if chance < 0.01:
            return self._bomb()
        if chance < 0.03:
            return rng.randbytes(rng.randrange(400))
        raw = rng.choice(self._seeds)
        if chance < 0.5 and self._shape in ("msgpack", "json"):
            grown = self._tree(raw)
            if grown is not None:
                return grown
        for _ in range(1 if rng.random() < 0.6 else rng.randrange(2, 6)):
            raw = self._hurt(raw)
        return raw

    def _bomb(self) -> bytes:
        rng = self._rng
        size = rng.choice(BOMB_SIZES[:-1]) if rng.random() < 0.97 else BOMB_SIZES[-1]
        if rng.random() < 0.0005:
            size = 5_000_000
        return rng.choice(BOMBS[self._shape])(size)

    def _hurt(self, raw: bytes) -> bytes:
        rng, n = self._rng, len(raw)
        at = rng.randrange(n + 1)
        kind = rng.randrange(9)
        if kind == 0 and n:
            at %= n
            return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
        if kind == 1:
            return raw[:at]
        if kind == 2:
            return raw[at:]
        if kind == 3:
            return raw[:at] + rng.randbytes(rng.randrange(1, 9)) + raw[at:]
        if kind == 4:
            return raw[:at] + raw[at + rng.randrange(1, 17) :]
        if kind == 5:
            other = rng.choice(self._seeds)
            return raw[:at] + other[rng.randrange(len(other) + 1) :]
        if kind == 6:
            piece = raw[at : at + rng.randrange(1, 65)]
            return raw[:at] + piece * rng.randrange(2, 40) + raw[at:]
        if kind == 7 and self._shape in ("json", "text"):
            spans = [m.span() for m in re.finditer(rb"-?\d+", raw[:4096])]
            if spans:
                start, end = rng.choice(spans)
                return raw[:start] + _number_text(rng) + raw[end:]
        return raw[:at] + rng.choice(CONTROLS) + raw[at + rng.randrange(3) :]

    def _tree(self, raw: bytes) -> bytes | None:
        """The example with one to three of its nodes replaced, dropped, doubled or renamed."""
        try:
            tree = (
                msgpack.unpackb(raw, raw=False, strict_map_key=False) if self._shape == "msgpack" else json.loads(raw)
            )
        except ValueError:
            return None
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            tree = self._grow(tree)
        try:
            if self._shape == "msgpack":
                packed: bytes = msgpack.packb(tree, use_bin_type=True, unicode_errors="surrogatepass")
                return packed
            return json.dumps(tree, default=repr).encode()
        except (ValueError, OverflowError, TypeError):
            return None

    def _grow(self, node: Any) -> Any:
        rng = self._rng
        if isinstance(node, dict) and node and rng.random() < 0.85:
            key = rng.choice(list(node))
            kind = rng.random()
            if kind < 0.75:
                return node | {key: self._grow(node[key])}
            if kind < 0.9:
                return {k: v for k, v in node.items() if k != key}
            return {(rng.choice(KEYS) if k == key else k): v for k, v in node.items()}
        if isinstance(node, list) and node and rng.random() < 0.85:
            at = rng.randrange(len(node))
            kind = rng.random()
            if kind < 0.7:
                return [*node[:at], self._grow(node[at]), *node[at + 1 :]]
            if kind < 0.85:
                return [*node[:at], *node[at + 1 :]]
            return node + node[at:] * rng.randrange(1, 5)
        if isinstance(node, bytes) and rng.random() < 0.7:
            return self._hurt(node)
        return _value(rng)


def _value(rng: random.Random) -> Any:
    kind = rng.randrange(10)
    if kind < 4:
        return rng.choice(NUMBERS)
    if kind < 7:
        return rng.choice(TEXTS)
    if kind == 7 and rng.random() < 0.3:
        return HUGE
    return rng.choice(OTHERS)


def _number_text(rng: random.Random) -> bytes:
    value = HUGE if rng.random() < 0.1 else rng.choice(NUMBERS)
    return str(value).encode()
