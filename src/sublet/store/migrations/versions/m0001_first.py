"""The first schema: the log, what is present, and which jobs an entry speaks of."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "entries",
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at_ms", sa.BigInteger, nullable=False),
        sa.Column("type", sa.String(40), nullable=False),
        sa.Column("event", sa.Text, nullable=False),
        sa.Column("effects", sa.Text, nullable=False),
    )
    op.create_table(
        "mentions",
        sa.Column("job", sa.String(80), primary_key=True),
        sa.Column("sequence", sa.BigInteger, primary_key=True, autoincrement=False),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(80), primary_key=True),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("user_name", sa.String(200), nullable=False),
        sa.Column("quota", sa.String(400), nullable=False),
        sa.Column("state", sa.String(20), nullable=False),
        sa.Column("submitted_ms", sa.BigInteger, nullable=False),
        sa.Column("record", sa.Text, nullable=False),
    )
    op.create_index("jobs_newest", "jobs", ["submitted_ms", "id"])
    op.create_index("jobs_by_state", "jobs", ["state", "submitted_ms", "id"])
    op.create_index("jobs_by_name", "jobs", ["name"])
    for table, length in (("nodes", 200), ("quotas", 400)):
        op.create_table(
            table,
            sa.Column("name", sa.String(length), primary_key=True),
            sa.Column("record", sa.Text, nullable=False),
        )
    op.create_table(
        "state",
        sa.Column("key", sa.String(40), primary_key=True),
        sa.Column("value", sa.Text, nullable=False),
    )
