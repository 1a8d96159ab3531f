"""`foray serve`: a policy as an OpenAI-compatible endpoint, with its search loop or alone."""
