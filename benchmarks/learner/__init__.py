"""The learner benchmark: one GRPO step against padded transformers loops and TRL."""
