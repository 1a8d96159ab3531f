"""The HTTP interface: routes, and one module per client dialect."""
