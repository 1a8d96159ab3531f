"""The verbs of the `foray` command, one module each, with `configure(parser)` and `run(args) -> exit code`.

A verb with subcommands also has `subcommands()`, name -> help, and its `configure` takes the chosen name too. A verb's
module is imported only when the verb is used, and it imports heavy packages only inside `run`.
"""
