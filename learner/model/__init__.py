"""The policy as torch sees it: attention, log-probs, LoRA, export, and the parity check at load."""
