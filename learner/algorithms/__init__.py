"""Algorithms: what a trajectory is worth, and what is minimised. One file each; the union is in `config_algorithm`."""
