"""The database of profiles: where it is, how it is opened, its schema, and what is read from and written to it."""

from budgetdb.store.profile_store import ProfileStore, StoreStatus
from budgetdb.store.schema import SchemaState
from budgetdb.store.upgrade import Upgrade

__all__ = ["ProfileStore", "SchemaState", "StoreStatus", "Upgrade"]
