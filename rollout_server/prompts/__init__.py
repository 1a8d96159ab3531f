"""Prompt templates: every text that the environment puts around a question, an observation and a refusal."""
