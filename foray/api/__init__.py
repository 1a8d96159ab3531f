"""Training and evaluation from Python: a notebook starts a run, looks at it and gets the trained model back."""
