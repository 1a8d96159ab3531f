"""Data sets, corpora, indexes and models: download, convert, inspect, mix, compare. Behind `foray data`."""
