"""The language model of the embedded engine: loading, forward pass, sampling, LoRA."""
