"""Secrets of a run: tokens, Redis users, certificates, and the environment of each role."""
