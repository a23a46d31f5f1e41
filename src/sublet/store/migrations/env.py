"""What Alembic runs to apply the migrations: on the connection that it is given, all of them in one transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=True)
with context.begin_transaction():
    context.run_migrations()
