"""The history of the database's schema; run by `budgetdb db upgrade`."""
