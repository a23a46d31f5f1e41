"""The routes of webhooks: who is told, what was told, and a try.

One rule: a webhook's secret is said once, when it is made.
"""

from dataclasses import dataclass
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from pydantic import BaseModel

from sublet.domain.errors import Refused, Unavailable
from sublet.notify.book import Delivery, Hook
from sublet.notify.hooks import new_hook, secret_of
from sublet.notify.sender import Sender
from sublet.service.reading import nearest
from sublet.service.views import Page, time_of

router = APIRouter()


class NewWebhook(BaseModel):
    """`on`: kinds of message; none: only what jobs ask for by its name. `quota`: only of its jobs.

    `secret`: left out, one is made.
    """

    name: str
    url: str
    on: list[str] = []
    quota: str = ""
    secret: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookView:
    name: str
    url: str
    on: tuple[str, ...]
    quota: str
    secret: str | None = None  # said once


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryView:
    number: int
    webhook: str
    id: str
    kind: str
    subject: str
    state: str
    tries: int
    made: str
    tried: str | None
    next: str | None
    answer: str


def sender_of(request: Request) -> Sender:
    sender: Sender | None = request.app.state.sender
    if sender is None:
        raise Unavailable(what="This server tells nobody.", hint="Start it with its webhooks.", code="no_webhooks")
    return sender


To = Annotated[Sender, Depends(sender_of)]


@router.get("/webhooks")
def list_webhooks(sender: To) -> Page[WebhookView]:
    return Page(kind="WebhookList", items=tuple(_hook(hook) for hook in sender.book.hooks()))


@router.post("/webhooks", status_code=201)
def create_webhook(sender: To, body: NewWebhook) -> WebhookView:
    """It hears of what happens from now on."""
    if sender.book.hook(body.name) is not None:
        raise Refused(what=f"There is a webhook {body.name} already.", code="webhook_exists", field="name")
    secret = body.secret or secret_of(sender.chance(32))
    hook = new_hook(body.name, body.url, body.on, body.quota, secret)
    sender.add(hook)
    return _hook(hook, secret=secret)


@router.delete("/webhooks/{name}", status_code=204)
def delete_webhook(sender: To, name: str) -> None:
    sender.book.remove(_known(sender, name).name)


@router.post("/webhooks/{name}/rotate")
def rotate_webhook(sender: To, name: str) -> WebhookView:
    """A new secret. Messages are signed with the one before it too, until the next time."""
    hook = _known(sender, name)
    return _hook(hook, secret=sender.rotate(hook))


@router.post("/webhooks/{name}/test")
def test_webhook(sender: To, name: str) -> DeliveryView:
    """Tries it once, at once; the answer says how that went."""
    return _delivery(sender.test(_known(sender, name)))


@router.get("/deliveries")
def list_deliveries(
    sender: To, webhook: str = "", cursor: str = "", limit: Annotated[int, Query(ge=1, le=1_000)] = 100
) -> Page[DeliveryView]:
    """What was told, the newest first."""
    if webhook:
        _known(sender, webhook)
    before = int(cursor) if cursor.isascii() and cursor.isdigit() and len(cursor) < 18 else None
    found = sender.book.deliveries(webhook, before=before, limit=limit)
    more = str(found[-1].number) if len(found) == limit else None
    return Page(kind="DeliveryList", items=tuple(map(_delivery, found)), next=more)


def _known(sender: Sender, name: str) -> Hook:
    hook = sender.book.hook(name)
    if hook is None:
        near = nearest(name, [one.name for one in sender.book.hooks()])
        hint = f"Did you mean {near}?" if near else "See them with sublet notify ls."
        raise Refused(what=f"There is no webhook {name}.", hint=hint, code="webhook_unknown", field="webhook")
    return hook


def _hook(hook: Hook, secret: str | None = None) -> WebhookView:
    return WebhookView(name=hook.name, url=hook.url, on=hook.kinds, quota=hook.quota, secret=secret)


def _delivery(one: Delivery) -> DeliveryView:
    return DeliveryView(
        number=one.number,
        webhook=one.hook,
        id=one.id,
        kind=one.kind,
        subject=one.subject,
        state=one.state,
        tries=one.tries,
        made=time_of(one.made_ms),
        tried=None if one.tried_ms is None else time_of(one.tried_ms),
        next=time_of(one.next_ms) if one.state == "waiting" else None,
        answer=one.answer,
    )
