"""One training step: forward passes, updates, critic, reference."""
