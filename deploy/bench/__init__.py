"""Benchmarks: each sets one figure of ours beside a baseline that ran on the same machine in the same run."""
