"""Web search engines as backends: one file per provider, limits, recordings, and guarded page fetches."""
