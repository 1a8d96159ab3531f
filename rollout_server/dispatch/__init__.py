"""Tasks in, groups out: the engine table, leases, running a task, publishing."""
