"""The figures of docs/benchmarks.md: how each is made, and the page from them."""
