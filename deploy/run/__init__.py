"""A run on disk and in Redis: directory, addresses, history, snapshot. Starts nothing."""
