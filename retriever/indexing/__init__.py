"""Building an index from a corpus: estimate, resumable build, verification."""
