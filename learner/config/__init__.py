"""Settings of the learner: fields only, no framework."""
