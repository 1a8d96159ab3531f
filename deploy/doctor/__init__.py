"""The checks of `foray doctor` and `foray up`: problems that would stop a run, each with a fix."""
