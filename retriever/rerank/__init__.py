"""Rerankers: a second, dearer look at the best hits of an index, one file each, all behind `base.Reranker`."""
