"""The `budgetdb` command; each subcommand is a file, and imports what it needs when it runs."""

from budgetdb.cli.program import main

__all__ = ["main"]
