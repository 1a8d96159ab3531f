"""`foray dashboard`: a run in the browser, live or finished, from its files and Redis. It changes nothing but drains."""
