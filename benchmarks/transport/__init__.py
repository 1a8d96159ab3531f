"""The transport benchmark: groups through Redis against the same bytes without delivery guarantees."""
