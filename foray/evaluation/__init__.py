"""`foray eval`: data sets, methods, statistics and reports.

suites.py     what to ask: named suites, files, data sets
targets.py    whom to ask: a run, a checkpoint, a model, an endpoint; starts and stops what it needs
models.py     text from an engine or an OpenAI-compatible endpoint, for the methods
methods/      how to ask: one method a file, and the registry
runner.py     asks, scores and stores each episode once
store.py      a directory of results, which may be continued
scoring.py, statistics.py, recipe.py, summary.py, published.py   pure functions over results
report.py     the summary for the terminal, as Markdown and as HTML
"""
