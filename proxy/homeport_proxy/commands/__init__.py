"""Subcommands of the `homeport` command line, one module each."""
