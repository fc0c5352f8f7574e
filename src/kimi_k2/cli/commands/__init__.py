"""The commands, one module each, with a `COMMAND` that says what is called; `cli.app` finds them."""
