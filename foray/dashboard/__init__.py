"""`foray dashboard`: a run in the browser, live or finished, from its files and Redis; operators drain engines."""
