"""Passages on disk: the memory-mapped corpus, the manifest of its index, and the source formats."""
