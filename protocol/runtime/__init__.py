"""I/O that every process does: settings, Redis, HTTP, files, metrics, logs, signals. Imports `protocol` only."""
