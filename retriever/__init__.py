"""The search service: an index and a corpus behind HTTP. It knows nothing of reinforcement learning."""
