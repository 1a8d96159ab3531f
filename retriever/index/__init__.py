"""Indexes: one file each, all behind `base.Index`."""

import logging

# before any of the files here imports faiss, which reports every instruction set that its wheel does not hold
logging.getLogger("faiss.loader").setLevel(logging.WARNING)
