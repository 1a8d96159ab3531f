"""Trajectories, and groups of them for one question."""
