"""What a run reports of itself: metrics, step log, HTTP endpoint, trackers."""
