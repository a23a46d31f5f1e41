"""One file a migration, named by its number. A published one is never changed."""
