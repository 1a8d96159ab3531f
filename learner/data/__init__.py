"""From questions to batches: sampler, filter, packing, replay buffer."""
