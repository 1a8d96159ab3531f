"""`python -m benchmarks.diagnose`: runs broken on purpose judge `foray diagnose`."""
