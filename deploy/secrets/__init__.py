"""Secrets of a run: tokens, Redis users, certificates, and environment files per role."""
