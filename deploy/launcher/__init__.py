"""From a configuration to the running processes of a run: plan, addresses, run directory, supervision."""
