"""The `foray` command and everything that sees all processes: launcher, status, demo, bench."""
