"""Checkpoints, their signatures, and the journal: how a run goes on, and is replayed."""
