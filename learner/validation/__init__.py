"""Validation of the policy on questions that it is not trained on, while training goes on."""
