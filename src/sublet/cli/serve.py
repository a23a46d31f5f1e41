"""The composition root: the only place that picks a store and an engine, and puts the parts together.

One rule: whatever ends this process, jobs go on and nothing durable is harmed.
"""

import json
import logging
import os
import secrets
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from sublet.client.find import NOTE, data_directory
from sublet.domain.errors import Broken, Refused, Unavailable
from sublet.domain.nodes import Node
from sublet.domain.quotas import Quota
from sublet.service.settings import DEFAULT_PORT, Cluster, Settings, Webhook

EXIT_INTERRUPTED = 130
PRETENDED = tuple(Node(name=name, spec="demo", gpu=2, tenant="demo") for name in ("n1", "n2"))
PROMISED = tuple(Quota(name=name, tenant="demo", nominal={"demo": 2}) for name in ("team-a", "team-b"))
TAKE_EVERY_S = 1.0  # a server that stands by asks so often whether it may lead
STREAMS_END_S = 1  # how long open streams may go on when the server ends


def _options(command: Callable[..., int]) -> Callable[..., int]:
    for option in (
        click.option("--config", type=click.Path(dir_okay=False), help="A file that describes nodes, quotas, rules."),
        click.option("--port", type=int, default=DEFAULT_PORT, show_default=True, help="0 takes any free one."),
        click.option("--data", type=click.Path(file_okay=False, path_type=Path), help="Where everything is kept."),
        click.option(
            "--pai-sha1", is_flag=True, help="Take PAI's older signatures (HMAC-SHA1), too; bodies stay open."
        ),
    ):
        command = option(command)
    return command


@click.command()
@_options
def up(data: Path | None, port: int, config: str | None, pai_sha1: bool) -> int:
    """Start a server on this machine, with its store and its engine.

    Without --config a new directory gets two nodes of two pretended GPUs each (spec demo) and the quotas team-a and
    team-b of two GPUs each. Ctrl-C ends the server; jobs go on, and the next server on the same directory finds them.
    """
    return _serve(data, port, config, pretends=True, takes_sha1=pai_sha1)


@click.command()
@click.option(
    "--database", metavar="URL", default="", envvar="SUBLET_DATABASE",
    help="postgresql://user@host/name; else a file in --data.",
)  # fmt: skip
@_options
def server(data: Path | None, port: int, config: str | None, database: str, pai_sha1: bool) -> int:
    """Run the server for the nodes and quotas that --config describes.

    Without --config those that it remembers are meant. Of several servers on one --database one leads; the others stand
    by, answer what only reads, and take over when it is gone.
    """
    return _serve(data, port, config, pretends=False, database=database, takes_sha1=pai_sha1)


def _serve(
    data: Path | None, port: int, config: str | None, pretends: bool, database: str = "", takes_sha1: bool = False
) -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", level=logging.WARNING)
    cluster = _read_config(config) if config else Cluster()
    place = (data or data_directory(os.environ)).absolute()
    settings = Settings(data=place, port=port, cluster=cluster, database=database, takes_sha1=takes_sha1)
    return run(settings, pretends)


def _read_config(file: str) -> Cluster:
    from sublet.service import clusterfile

    try:
        return clusterfile.parse(Path(file).read_text("utf-8"), file)
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(what=f"{file} cannot be read.", why=f"The system says: {error}.", code="file") from error


def run(settings: Settings, pretends: bool) -> int:
    """Serves until a signal ends it, then 130 after Ctrl-C and 0 otherwise.

    Unavailable or Refused when it cannot begin, Broken when the controller ended by itself.
    """
    from sublet.store.sql import open_postgresql, open_sqlite

    life = _Life()
    with ExitStack() as ends:
        store = open_postgresql(settings.database) if settings.database else open_sqlite(settings.data)
        ends.callback(store.close)
        listener = _listen(settings.host, settings.port)
        ends.callback(listener.close)
        url = f"http://{settings.host}:{listener.getsockname()[1]}"
        ends.enter_context(life.signals())
        face = _Face()
        if not store.may_write():
            face.app = _standby_app(store, settings)
            ends.enter_context(_answering(face, listener, life))
            _stand_by(store, life, url)
        if not life.over.is_set():
            settings.data.mkdir(parents=True, exist_ok=True)
            _lead(store, settings, pretends, face, life, ends, url)
            if not face.is_answering:
                ends.enter_context(_answering(face, listener, life))
            ends.enter_context(_noted(settings.data, url))
            _greet(url, settings.data)
            life.over.wait()
    if life.failures:
        hint = "Start the server again; nothing durable is lost."
        raise Broken(what="The server has ended.", why=f"It met {life.failures[0]!r}.", hint=hint)
    return EXIT_INTERRUPTED if life.is_interrupted else 0


class _Face:
    """The HTTP application of the moment: a server that takes over goes on with the same port and connections."""

    def __init__(self) -> None:
        self.app: Any = None
        self.is_answering = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.app(scope, receive, send)


def _standby_app(store: Any, settings: Settings) -> Any:
    """Answers what only reads."""
    from importlib.metadata import version

    from sublet.faces.rest.app import Health, create_app
    from sublet.service.desk import Desk
    from sublet.service.feed import Feed
    from sublet.service.standby import StandbyBooks

    feed = Feed(store)
    feed.load()
    desk = Desk(
        books=StandbyBooks(feed, _Clock(), store.last_sequence, store.leader),
        feed=feed,
        clock=_Clock(),
        new_id=_new_id,
        log_path=lambda job, attempt, instance: None,
    )
    health = Health(version=version("sublet"), checks={"leader": lambda: "it stands by"})
    return _beside(create_app(desk, health), desk, settings)


def _stand_by(store: Any, life: "_Life", url: str) -> None:
    """Until this server leads or its life is over."""
    click.echo(f"Sublet at {url} stands by for {store.leader() or 'the server that leads'}")
    while not life.over.wait(TAKE_EVERY_S):
        try:
            if store.may_write():
                return
        except Unavailable as problem:  # the database is away: whoever leads is no better off
            logging.getLogger("sublet").warning("the database cannot be asked who leads: %s", problem)


def _lead(
    store: Any, settings: Settings, pretends: bool, face: _Face, life: "_Life", ends: ExitStack, url: str
) -> None:
    parts = _put_together(store, settings, pretends)
    if store.lead is not None:
        store.lead.lost = life.over.set  # started again it stands by
        store.say_leader(url)
    ends.callback(parts.engine.close)
    ends.callback(parts.sender.book.close)
    ends.enter_context(parts.feed.listening(parts.sender.wake))
    ends.enter_context(life.part("webhooks", parts.sender.run, parts.sender.end))
    ends.enter_context(_turning(parts.controller, life))
    face.app = parts.app


def _new_id() -> str:
    from sublet.domain.ids import job_id_from_bytes

    return job_id_from_bytes(secrets.token_bytes(16))


class _Turns:
    """How long the controller's turns take. `told` hears of each, in seconds."""

    def __init__(self) -> None:
        self.told: Callable[[float], None] = lambda seconds: None
        self._began_s = self._done_s = time.monotonic()

    def step(self, name: str) -> None:
        if name == "take":
            self._began_s = time.monotonic()
        elif name == "commit":
            self._done_s = time.monotonic()
            self.told(self._done_s - self._began_s)

    def lag_seconds(self, inbox: Any) -> float:
        """Since the last turn that ended, while something waits."""
        return time.monotonic() - self._done_s if len(inbox) else 0.0


class _Life:
    """How long the server lives: until a signal comes or a part of it fails."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.is_interrupted = False
        self.failures: list[BaseException] = []

    @contextmanager
    def signals(self) -> Iterator[None]:
        def end(number: int, _frame: object) -> None:
            self.is_interrupted = number == signal.SIGINT
            self.over.set()

        heard = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, end) for number in heard}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def part(self, name: str, work: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
        """Does the work in a thread until `end` makes it stop; when it fails by itself the server's life is over."""

        def guarded() -> None:
            try:
                work()
            except Exception as error:  # the edge of the thread: told by `run`
                logging.getLogger("sublet").critical("%s has failed", name, exc_info=True)
                self.failures.append(error)
            self.over.set()

        thread = threading.Thread(target=guarded, name=name)
        thread.start()
        try:
            yield
        finally:
            while thread.is_alive():  # a wake-up that comes just before the part waits would be missed
                end()
                thread.join(0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    controller: Any
    engine: Any
    sender: Any
    feed: Any
    app: Any


def _put_together(store: Any, settings: Settings, pretends: bool) -> _Parts:
    from importlib.metadata import version

    from sublet.controller.loop import Controller
    from sublet.engines.local import LocalEngine
    from sublet.faces.rest.app import Health, create_app
    from sublet.notify.book import Book
    from sublet.notify.sender import Sender
    from sublet.service.desk import Desk
    from sublet.service.feed import Feed
    from sublet.service.metrics import Metrics

    feed = Feed(store)
    feed.load()
    cluster = _whole_cluster(feed, settings.cluster, pretends)
    engine = LocalEngine(directory=settings.data / "instances", nodes=cluster.nodes or (), verdicts=cluster.verdicts)
    turns = _Turns()
    controller = Controller(feed, engine, _Clock(), between=turns.step)
    desk = Desk(
        books=controller,
        feed=feed,
        clock=_Clock(),
        new_id=_new_id,
        log_path=engine.log_path,
        answer_within_ms=settings.answer_within_ms,
    )
    _put_first_events(feed, controller, cluster)
    checks = {"controller": lambda: "" if controller.is_ready else "it does not turn"}
    sender = Sender(
        book=Book(settings.data / "notify.db"),
        entries=lambda after, limit: feed.entries(after=after, limit=limit),
        last_sequence=lambda: feed.last_sequence,
        look=feed.job,
        clock=_Clock(),
        source=f"/sublet/{socket.gethostname()}",
        chance=secrets.token_bytes,
    )
    _set_webhooks(sender, cluster.webhooks)
    metrics = Metrics(desk=desk, version=version("sublet"), lag_seconds=lambda: turns.lag_seconds(controller.inbox))
    turns.told = metrics.turned
    app = create_app(desk, Health(version=version("sublet"), checks=checks, metrics=metrics.scrape), sender)
    app = _beside(app, desk, settings)
    return _Parts(controller=controller, engine=engine, sender=sender, feed=feed, app=app)


def _set_webhooks(sender: Any, wanted: Sequence[Webhook]) -> None:
    """Those of the configuration; a secret that it does not name is made once, and kept."""
    from sublet.notify.hooks import new_hook, secret_of, with_secret

    for one in wanted:
        known = sender.book.hook(one.name)
        given = _read_secret(one.secret_file) if one.secret_file else ""
        secret = given or (known.secrets[0] if known else secret_of(secrets.token_bytes(32)))
        hook = new_hook(one.name, one.url, one.on, one.quota, secret)
        if known is None:
            sender.add(hook)
        else:
            sender.change(known, replace(hook, secrets=with_secret(known, secret).secrets))


def _read_secret(file: str) -> str:
    try:
        return Path(file).read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = f"The system says: {getattr(error, 'strerror', '') or 'it is no text'}."
        raise Refused(what=f"{file}, with the secret of a webhook, cannot be read.", why=why, code="file") from error


def _beside(app: Any, desk: Any, settings: Settings) -> Any:
    """PAI's API on the same port."""
    from sublet.faces.pai.app import Pai, beside
    from sublet.faces.pai.book import Book
    from sublet.faces.pai.keys import find, kept_key
    from sublet.faces.pai.signing import Verifier

    settings.data.mkdir(parents=True, exist_ok=True)
    key = kept_key(settings.data / "pai-key.json", secrets.token_bytes)
    verifier = Verifier(find=find(key), takes_sha1=settings.takes_sha1)
    pai = Pai(
        desk=desk,
        book=Book(settings.data / "pai.db"),
        verifier=verifier,
        new_request_id=lambda: str(uuid.uuid4()).upper(),
    )
    return beside(pai, app)


def _whole_cluster(feed: Any, given: Cluster, pretends: bool) -> Cluster:
    """What the file says; where it is silent what the store remembers; in a new directory what is pretended."""
    from sublet.service.checks import check_tree

    remembered = tuple(record.node for record in feed.nodes.values())
    is_new = pretends and not remembered and not feed.quotas and given.nodes is None and given.quotas is None
    nodes = given.nodes if given.nodes is not None else remembered or (PRETENDED if is_new else ())
    quotas = given.quotas if given.quotas is not None else PROMISED if is_new else ()
    if not nodes:
        hint = "Describe some in a file: --config FILE."
        raise Refused(what="There are no nodes.", why="Neither a file nor the directory names any.", hint=hint)
    from sublet.domain.changes import NodeRecord

    named = {node.name: NodeRecord(node=node) for node in nodes}
    check_tree({**feed.quotas, **{quota.name: quota for quota in quotas}}, named)
    return replace(given, nodes=nodes, quotas=quotas)


def _put_first_events(feed: Any, controller: Any, cluster: Cluster) -> None:
    """What the configuration changes of what the store remembers; the nodes themselves are reported by the engine."""
    from sublet.domain.events import NodeRemoved, QuotaSet, RulesSet

    now_ms = _Clock().now_ms()
    if cluster.rules is not None and cluster.rules != feed.rules:
        controller.put(RulesSet(at_ms=now_ms, rules=cluster.rules))
    for name in sorted(set(feed.nodes) - {node.name for node in cluster.nodes or ()}):
        controller.put(NodeRemoved(at_ms=now_ms, node=name))
    for quota in cluster.quotas or ():
        if feed.quotas.get(quota.name) != quota:
            controller.put(QuotaSet(at_ms=now_ms, quota=quota))


class _Clock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise Unavailable(
            what=f"The server cannot listen on {host}:{port}.",
            why=f"The system says: {error.strerror}.",
            hint="End what listens there, or choose another with --port; 0 takes any free one.",
            code="port_in_use",
            field="port",
        ) from error
    return listener


@contextmanager
def _turning(controller: Any, life: _Life) -> Iterator[None]:
    controller.recover()
    controller.turn()  # what the configuration says holds before anybody is answered
    with life.part("controller", controller.run, controller.stop):
        yield


@contextmanager
def _answering(app: _Face, listener: socket.socket, life: _Life) -> Iterator[None]:
    import uvicorn

    app.is_answering = True

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=STREAMS_END_S
    )
    server = uvicorn.Server(config)  # outside of the main thread it leaves the signals alone
    with life.part("http", lambda: server.run(sockets=[listener]), lambda: setattr(server, "should_exit", True)):
        yield


@contextmanager
def _noted(data: Path, url: str) -> Iterator[None]:
    """A note for clients on this machine, as long as the server listens."""
    note = data / NOTE
    try:
        new = note.with_suffix(".new")
        new.write_text(json.dumps({"url": url, "pid": os.getpid()}), "utf-8")
        new.replace(note)
    except OSError as error:
        why = f"The system says: {error.strerror}."
        hint = "Free space there, or choose another directory with --data."
        raise Unavailable(what=f"{note} cannot be written.", why=why, hint=hint, code="directory_unwritable") from error
    try:
        yield
    finally:
        note.unlink(missing_ok=True)


def _greet(url: str, data: Path) -> None:
    click.echo(f"Sublet at {url}   data in {data}")
    if data != data_directory(os.environ).absolute():
        click.echo(f"Elsewhere:  export SUBLET_SERVER={url}")
    click.echo("Ctrl-C ends the server; jobs go on.")
