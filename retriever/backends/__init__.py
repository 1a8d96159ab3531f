"""Backends that answer queries: an index over a corpus, an online engine, a memory of earlier searches."""
