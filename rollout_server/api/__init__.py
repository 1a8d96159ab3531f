"""The HTTP side of a rollout server."""
