"""The checks of `foray doctor` and `foray up`: what would stop a run, each with its fix."""
