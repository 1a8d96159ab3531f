"""The engine table, task leases, running a task, and publishing its group."""
