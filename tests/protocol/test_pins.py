"""The value of the key `evaluation`."""

from __future__ import annotations

import pytest

from protocol.versions import PolicyVersion, VersionPin

V = PolicyVersion


@pytest.mark.parametrize("eval_engines", [False, True])
@pytest.mark.parametrize("version", [None, V(1, 25)])
@pytest.mark.parametrize("holder", ["r1", "at home", "a\nb", ""])
def test_a_pin_survives_its_text(holder: str, version: V | None, eval_engines: bool) -> None:
    pin = VersionPin(holder, eval_engines, version)
    assert VersionPin.parse(str(pin).encode()) == pin


def test_any_other_value_pins_every_engine() -> None:
    pin = VersionPin.parse(b"\xff somebody")
    assert pin is not None and pin.holds_back("rollout", V(1, 1)) and pin.holds_back("eval", V(1, 1))
    assert VersionPin.parse(None) is None


@pytest.mark.parametrize(
    ("pin", "role", "version", "waits"),
    [
        (VersionPin("r"), "rollout", V(1, 3), True),
        (VersionPin("r", True), "rollout", V(1, 3), False),
        (VersionPin("r", True), "eval", V(1, 3), True),
        (VersionPin("r", version=V(1, 3)), "rollout", V(1, 3), False),
        (VersionPin("r", version=V(1, 3)), "rollout", V(1, 4), True),
        (VersionPin("r", version=V(1, 3)), "rollout", V(2, 3), True),
        (VersionPin("r", True, V(1, 3)), "rollout", V(1, 4), False),
        (VersionPin("r", True, V(1, 3)), "eval", V(1, 4), True),
    ],
)
def test_engines_may_load_the_pinned_version_and_none_after_it(
    pin: VersionPin, role: str, version: V, waits: bool
) -> None:
    assert pin.holds_back(role, version) is waits
