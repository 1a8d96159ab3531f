"""The HTTP API of a rollout server."""
