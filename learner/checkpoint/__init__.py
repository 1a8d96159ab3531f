"""Checkpoints, their signatures, and the journal: how a run resumes and is replayed."""
