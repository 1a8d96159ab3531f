"""GPUs of a run: what there is, what the processes need, who gets which, and hardware profiles over presets."""
