"""Reports of a run: metrics, step log, HTTP endpoint, trackers."""
