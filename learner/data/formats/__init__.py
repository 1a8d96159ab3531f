"""Formats of question files. Each record becomes an `Asked`; imports no framework."""

from __future__ import annotations

from learner.data.formats.base import QuestionFormat
from learner.data.formats.dpr import DPR
from learner.data.formats.hotpotqa import HOTPOTQA, TWOWIKI
from learner.data.formats.multihop import MUSIQUE, SIMPLEDEEPSEARCHER, STRATEGYQA
from learner.data.formats.openqa import FRAMES, SIMPLEQA, TRIVIAQA
from learner.data.formats.plain import FLASHRAG, FORAY, NQ_OPEN, POPQA
from learner.data.formats.search_r1 import SEARCH_R1
from protocol.runtime.records import Record

FORMATS: dict[str, QuestionFormat] = {
    "search_r1": SEARCH_R1,
    "triviaqa": TRIVIAQA,
    "simpledeepsearcher": SIMPLEDEEPSEARCHER,
    "2wiki": TWOWIKI,
    "musique": MUSIQUE,
    "strategyqa": STRATEGYQA,
    "hotpotqa": HOTPOTQA,
    "dpr": DPR,
    "flashrag": FLASHRAG,
    "popqa": POPQA,
    "simpleqa": SIMPLEQA,
    "frames": FRAMES,
    "foray": FORAY,
    "nq_open": NQ_OPEN,
}
"""Formats by name. To add one, write one file and one line here; the first that fits a file's first record is used."""


def detect(record: Record) -> str:
    """Return the name of the format of a file's first record, "" if none fits."""
    return next((name for name, form in FORMATS.items() if form.fits(record)), "")
