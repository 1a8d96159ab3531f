"""The environment of a policy: prompts, actions, observations, tokenizer."""
