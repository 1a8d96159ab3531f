"""Commands that show a run: `foray status`, `top`, `runs`, `logs`, `curves`, `replay`, `grafana`."""
