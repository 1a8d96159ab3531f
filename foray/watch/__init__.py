"""Views of a run: snapshot, status, live top, evaluation, plots, trajectories."""
