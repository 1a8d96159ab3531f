"""Agents that call an OpenAI-compatible endpoint: their model calls are recorded token by token and trained."""
