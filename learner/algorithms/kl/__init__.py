"""Divergences of the policy from a reference (pure torch): one file per family."""
