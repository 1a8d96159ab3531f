"""The verbs of the `foray` command, one module each: `configure(parser)` and `run(args) -> exit code`.

A verb's module is imported only when the verb is used, and imports what is heavy only inside `run`.
"""
