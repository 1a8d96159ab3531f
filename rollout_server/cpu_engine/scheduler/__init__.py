"""Continuous batching: requests, KV cache, prefix cache, and the engine thread."""
