"""`foray dashboard`: a run in the browser, live or finished, from Redis, `metrics.jsonl` and the journal. Read-only."""
