"""Indexes: one file each, all behind `base.Index`."""
