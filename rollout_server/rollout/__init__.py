"""Generation of trajectories and trajectory groups."""
