"""Start and supervise the processes of a run: plan, addresses, run directory, supervisor."""
