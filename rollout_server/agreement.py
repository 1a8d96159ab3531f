"""Whether this process and the learner can work together: `Keys.meta`, compared at the start and at every change.

Which run this process belongs to is said by the lineage id in its run directory; where it can read none (another disk),
the first one that it sees in Redis. A learner that takes the run over for another lineage so ends the processes of the
one before: their settings, prompts and rewards are not its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from protocol.codec import SCHEMA_MAJOR, SCHEMA_MINOR
from protocol.errors import UserError
from protocol.meta import (
    LINEAGE_FILE,
    RunMeta,
    foreign,
    lineage_id_in,
    lineage_id_of,
    parse,
    refusal,
    tokenizer_digest,
)
from protocol.redis_url import redacted
from protocol.settings import RunSettings

log = logging.getLogger(__name__)


class Agreement:
    """What this process is: the run it works for, its tokenizer, and the settings that the learner has too.

    facts  settings that should be the learner's, by their names in `RunMeta.facts`; another value is logged
    """

    def __init__(self, run: RunSettings, **facts: object) -> None:
        self._run, self._facts = run, {name: str(value) for name, value in facts.items()}
        try:
            self._tokenizer = tokenizer_digest((run.model / "tokenizer.json").read_bytes())
        except OSError:
            self._tokenizer = ""  # whoever needs it says what is wrong
        self._last: RunMeta | None = None
        self._lineage_id = ""

    @property
    def lineage_id(self) -> str:
        """Which run this process works for; "" while no learner has said so."""
        return self._lineage_id

    def check(self, raw: Mapping[bytes, bytes]) -> None:
        """Compare with what the learner wrote; raises UserError when this process must not go on.

        Called at every look at Redis: only what is new is compared, and so logged once. No meta is an older learner
        (or none yet), and fine.
        """
        if (lineage_id := lineage_id_of(raw)) and lineage_id != self._lineage_id:
            self._compare(raw, lineage_id)
        theirs = parse(raw)
        if theirs is None or theirs == self._last:
            return
        error = refusal(theirs, run=self._run.id, tokenizer=self._tokenizer)
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

    def _compare(self, raw: Mapping[bytes, bytes], lineage_id: str) -> None:
        """The lineage in Redis is new to us."""
        run = self._run
        try:
            ours = lineage_id_in((run.dir / LINEAGE_FILE).read_text(errors="replace"))
        except OSError:
            ours = ""
        if (ours or self._lineage_id or lineage_id) != lineage_id:
            whose = f"{run.dir.absolute()}, lineage {ours[:8]}" if ours else f"lineage {self._lineage_id[:8]}"
            raise _elsewhere(raw, run, whose)
        self._lineage_id = lineage_id


def _elsewhere(raw: Mapping[bytes, bytes], run: RunSettings, whose: str) -> UserError:
    return foreign(
        raw,
        run=run.id,
        redis=redacted(run.redis_url),
        ours=whose,
        todo="to work for the run in Redis (a learner may have taken it over), start this process again with that "
        "run's configuration and run.dir; else give your run another run.id, for all of its processes",
    )
