"""What Alembic runs: the migrations, on the connection that the caller hands over.

The caller owns the transaction and the lock (`budgetdb.store.upgrade`). There is no URL here: Alembic's configuration
would print a password that holds a `%`.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy.engine import Connection, Engine

from budgetdb.store.schema import VERSION_TABLE
from budgetdb.store.tables import metadata


def run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        version_table=VERSION_TABLE,
        render_as_batch=connection.dialect.name == "sqlite",
        # Alembic would commit the caller's transaction at the end of its own.
        transactional_ddl=False,
    )
    with context.begin_transaction():
        context.run_migrations()


connectable: Connection | Engine = context.config.attributes["connection"]
if isinstance(connectable, Engine):
    with connectable.begin() as connection:
        run(connection)
else:
    run(connectable)
