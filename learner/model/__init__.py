"""The policy in torch: attention, log-probs, LoRA, export, and the parity check at load."""
