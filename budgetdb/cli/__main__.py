"""`python -m budgetdb.cli`."""

from budgetdb.cli.program import main

main()
