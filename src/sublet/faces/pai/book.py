"""What PAI's API must remember beside jobs and quotas: descriptions, labels, bindings; one small database.

One rule: nothing here decides what runs. Without it a job or a quota shows less, and all else is as before.
"""

import json
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

JOB, DELETED, QUOTA, WORKSPACE = "job", "deleted", "quota", "workspace"
SCHEMA = "CREATE TABLE IF NOT EXISTS notes (kind TEXT, name TEXT, text TEXT NOT NULL, PRIMARY KEY (kind, name))"


class Book:
    """One note, a JSON object, by kind and name. For any thread."""

    def __init__(self, path: Path) -> None:
        self._guard = threading.Lock()
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute(SCHEMA)

    def note(self, kind: str, name: str) -> dict[str, Any]:
        """Empty when there is none."""
        with self._guard:
            rows = self._connection.execute("SELECT text FROM notes WHERE kind = ? AND name = ?", (kind, name))
            row = rows.fetchone()
        return dict(json.loads(row[0])) if row else {}

    def notes(self, kind: str) -> dict[str, dict[str, Any]]:
        with self._guard:
            rows = self._connection.execute("SELECT name, text FROM notes WHERE kind = ?", (kind,)).fetchall()
        return {name: json.loads(text) for name, text in rows}

    def put(self, kind: str, name: str, note: Mapping[str, Any]) -> None:
        with self._guard:
            text = json.dumps(note, ensure_ascii=False, sort_keys=True)
            self._connection.execute("INSERT OR REPLACE INTO notes VALUES (?, ?, ?)", (kind, name, text))

    def remove(self, kind: str, name: str) -> None:
        with self._guard:
            self._connection.execute("DELETE FROM notes WHERE kind = ? AND name = ?", (kind, name))

    def close(self) -> None:
        with self._guard:
            self._connection.close()
