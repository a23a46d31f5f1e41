"""What a webhook is: whose messages it wants, and how they are signed for it.

One rule: a secret stands in no message of an error, and in no answer but the one that makes it.
Signed as the Standard Webhooks specification says: HMAC-SHA256 over id, time and body, with the webhook's own secret.
"""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import replace
from urllib.parse import urlsplit

from sublet.domain.errors import Refused
from sublet.notify.book import Hook
from sublet.notify.messages import KINDS, Message

SECRET_PREFIX = "whsec_"
KEY_BYTES = range(24, 65)  # as the specification says


def new_hook(name: str, url: str, kinds: Sequence[str], quota: str, secret: str) -> Hook:
    """Refused for what is no address, a kind that there is not, or what is no secret."""
    _check_url(url)
    if not name or len(name) > 100 or not name.isprintable() or "/" in name:
        raise Refused(what="That is no name of a webhook.", hint="A word will do.", code="malformed", field="name")
    known = [kind for kind in KINDS if kind != "test"]
    for kind in kinds:
        if kind not in known:
            why = f"It may be {', '.join(known)}."
            raise Refused(what=f"{kind} is not known.", why=why, code="malformed", field="on")
    _key(secret)
    return Hook(name=name, url=url, secrets=(secret,), kinds=tuple(dict.fromkeys(kinds)), quota=quota)


def _check_url(url: str) -> None:
    hint = "Write https://host/path."
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and url.isascii() and parts.port != 0
    except ValueError:  # a port that is none, a bracket that is not closed
        is_address = False
    if not is_address or not url.isprintable() or " " in url:
        raise Refused(what=f"{url or 'Nothing'} is no address of a webhook.", hint=hint, code="malformed", field="url")
    if parts.username is not None:
        why = "Everybody who lists webhooks would see it; messages are signed instead."
        raise Refused(what="The address names a user or a password.", why=why, hint=hint, code="malformed", field="url")


def secret_of(key: bytes) -> str:
    """`key`: 32 random bytes."""
    return SECRET_PREFIX + base64.b64encode(key).decode()


def with_secret(hook: Hook, secret: str) -> Hook:
    """Signed with the new secret, and with the one before it, so that the receiver can change over in peace."""
    _key(secret)
    return hook if hook.secrets[0] == secret else replace(hook, secrets=(secret, hook.secrets[0]))


def wants(hook: Hook, message: Message) -> bool:
    """A quota's webhook hears of the quotas below it as well."""
    if hook.name in message.asked:
        return True
    is_its = not hook.quota or message.quota == hook.quota or message.quota.startswith(f"{hook.quota}/")
    return message.kind in hook.kinds and is_its


def signature(secrets: Sequence[str], message_id: str, time_s: int, body: str) -> str:
    """One for each secret, with spaces in between."""
    signed = f"{message_id}.{time_s}.{body}".encode()
    digests = [hmac.digest(_key(secret), signed, hashlib.sha256) for secret in secrets]
    return " ".join(f"v1,{base64.b64encode(digest).decode()}" for digest in digests)


def _key(secret: str) -> bytes:
    try:
        key = base64.b64decode(secret.removeprefix(SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if len(key) not in KEY_BYTES:
        why = f"A secret is {SECRET_PREFIX} and {KEY_BYTES.start} to {KEY_BYTES.stop - 1} bytes in base64."
        raise Refused(what="The webhook's secret is none.", why=why, code="malformed", field="secret")
    return key
