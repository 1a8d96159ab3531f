"""The figures of docs/benchmarks.md: make each one, and generate the page."""
