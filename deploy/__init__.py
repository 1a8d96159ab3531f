"""The `foray` command and everything that handles a whole run: launcher, status, doctor, demo."""
