"""Whether this process and the learner can work together: `Keys.meta`, compared at the start and at every change."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from protocol.codec import SCHEMA_MAJOR, SCHEMA_MINOR
from protocol.meta import RunMeta, parse, refusal, tokenizer_digest

log = logging.getLogger(__name__)


class Agreement:
    """What this process is: the run it works for, its tokenizer, and the settings that the learner has too.

    facts  settings that should be the learner's, by their names in `RunMeta.facts`; another value is logged
    """

    def __init__(self, run: str, model: Path, **facts: object) -> None:
        self._run, self._facts = run, {name: str(value) for name, value in facts.items()}
        try:
            self._tokenizer = tokenizer_digest((model / "tokenizer.json").read_bytes())
        except OSError:
            self._tokenizer = ""  # whoever needs it says what is wrong
        self._last: RunMeta | None = None

    def check(self, raw: Mapping[bytes, bytes]) -> None:
        """Compare with what the learner wrote; raises UserError when this process must not go on.

        Called at every look at Redis: only what is new is compared, and so logged once. No meta is an older learner
        (or none yet), and fine.
        """
        theirs = parse(raw)
        if theirs is None or theirs == self._last:
            return
        error = refusal(theirs, run=self._run, tokenizer=self._tokenizer)
        if error is not None:
            raise error
        if theirs.schema[1] != SCHEMA_MINOR:
            log.warning(
                "the learner writes schema %d.%d, this process %d.%d: they can read each other; upgrade the older one",
                *(*theirs.schema, SCHEMA_MAJOR, SCHEMA_MINOR),
            )
        for name, ours in self._facts.items():
            if name in theirs.facts and theirs.facts[name] != ours:
                log.warning("run.%s is %s here and %s at the learner", name, ours, theirs.facts[name])
        self._last = theirs
