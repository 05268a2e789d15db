"""Every read and write of MongoDB. See `store` for the order in which to read the verbs."""

from taskmesh.store.store import Store

__all__ = ["Store"]
