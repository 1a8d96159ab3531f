"""The search service: an index and a corpus behind HTTP. It is independent of reinforcement learning."""
