"""Events are small, and can be read back whatever wrote them."""

from __future__ import annotations

from protocol import events


def test_an_event_reads_back_as_it_was_written() -> None:
    written = events.fields("learner", "0", "epoch", "epoch 3 begins at step 12")
    assert events.parse({k.encode(): v.encode() for k, v in written.items()}) == written


def test_a_long_text_is_cut_and_foreign_entries_do_not_break_the_reader() -> None:
    assert len(events.fields("node", "a", "died", "x" * 10_000)["text"]) == events.TEXT_CHARACTERS
    assert events.parse({b"kind": b"\xff"}) == {"process": "", "id": "", "kind": "�", "text": ""}
