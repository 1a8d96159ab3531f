"""Supervised fine-tuning on conversations: micro-batches, and a training loop that can be stopped at any point."""
