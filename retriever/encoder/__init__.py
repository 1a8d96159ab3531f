"""Encoders: text to vectors, one file each, all behind `base.Encoder`."""
