"""Token losses, to be minimised (pure torch): one file per family."""
