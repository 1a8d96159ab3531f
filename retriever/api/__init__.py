"""The HTTP interface: routes, and one module for each dialect of clients."""
