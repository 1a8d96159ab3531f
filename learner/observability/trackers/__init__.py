"""Where the numbers of each step go besides `metrics.jsonl`: one file for each tracker, and what keeps them apart."""
