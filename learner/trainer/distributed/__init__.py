"""The training step on several ranks: leader, workers, and the channel between them."""
