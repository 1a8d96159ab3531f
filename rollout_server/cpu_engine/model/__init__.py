"""The language model of the CPU engine: loading, forward pass, sampling, LoRA."""
