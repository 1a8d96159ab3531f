"""Backends that answer queries: an index over a corpus, a web search engine."""
