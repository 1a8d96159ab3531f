"""`make gpu-check`: what has never run on a GPU, in stages that each end in minutes."""
