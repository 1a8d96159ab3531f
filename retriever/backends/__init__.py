"""Backends that answer queries: an index over a corpus, a web search engine, a memory of earlier searches."""
