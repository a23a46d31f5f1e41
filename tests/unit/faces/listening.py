"""A real server on a free port of this machine, over a world whose time and machines are simulated."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from sublet.faces.rest.app import Health, create_app
from tests.unit.service.world import World


@contextmanager
def listening(world: World) -> Iterator[str]:
    """Its URL. It takes connections from the first moment: the socket listens before the thread begins."""
    health = Health(version="1.2.3", checks={"controller": lambda: "" if world.controller.is_ready else "it rests"})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            create_app(world.desk, health), log_level="error", lifespan="off", timeout_graceful_shutdown=1
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: server.run(sockets=[listener]))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
