"""Who signed a request: ACS3-HMAC-SHA256, and, where it is allowed, the older ROA V2 with HMAC-SHA1.

One rule: a request counts once, within a window around its date, and only as it was signed. The schemes are those of
Alibaba Cloud's public documents: what is signed is the raw path and the decoded query.
"""

import base64
import hashlib
import hmac
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Generic, TypeVar
from urllib.parse import parse_qsl, quote

from sublet.domain.errors import Refused

WINDOW_MS = 15 * 60_000  # on both sides of the server's clock
REMEMBERED = 400_000  # requests; a flood of signed ones ends in refusals, not in a server without memory
SIGNED_AT_LEAST = {"host", "x-acs-content-sha256", "x-acs-date", "x-acs-version", "x-acs-signature-nonce"}
_ACS3 = re.compile(r"ACS3-HMAC-SHA256 +Credential=([^,\s]+) *, *SignedHeaders=([^,\s]+) *, *Signature=([0-9a-f]{64})")
_ROA = re.compile(r"acs ([^:\s]+):([A-Za-z0-9+/=]+)")

Who = TypeVar("Who")


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """A request as it came: `path` and `query` raw, `headers` by lower-case name."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True, kw_only=True)
class Seen:
    """The nonces of the window."""

    _until: dict[bytes, int] = field(default_factory=dict, init=False)
    _swept_ms: int = field(default=0, init=False)
    _guard: threading.Lock = field(default_factory=threading.Lock, init=False)

    def once(self, key: Sequence[str], dated_ms: int, now_ms: int) -> bool:
        """Whether this is the first time. It is remembered until its date alone would refuse it."""
        short = hashlib.blake2b("\0".join(key).encode(), digest_size=16).digest()
        with self._guard:
            if now_ms - self._swept_ms > WINDOW_MS // 15:
                self._until = {one: until for one, until in self._until.items() if until >= now_ms}
                self._swept_ms = now_ms
            if short in self._until or len(self._until) >= REMEMBERED:
                return False
            self._until[short] = dated_ms + WINDOW_MS
            return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Verifier(Generic[Who]):
    """`find`: the secret of an access key and whose it is. `takes_sha1`: the older scheme, which leaves bodies open."""

    find: Callable[[str], tuple[str, Who] | None]
    takes_sha1: bool = False
    seen: Seen = field(default_factory=Seen)

    def who(self, request: Signed, now_ms: int) -> Who:
        """Refused when it is not signed, not rightly, not now, or not for the first time."""
        said = request.headers.get("authorization", "")
        if (acs3 := _ACS3.fullmatch(said)) is not None:
            return self._acs3(request, acs3[1], acs3[2].split(";"), acs3[3], now_ms)
        if (roa := _ROA.fullmatch(said)) is not None:
            return self._roa(request, roa[1], roa[2], now_ms)
        raise refused("IncompleteSignature", "The request carries no signature that can be read.")

    def _acs3(self, request: Signed, key: str, signed: Sequence[str], signature: str, now_ms: int) -> Who:
        headers = request.headers
        missing = sorted((SIGNED_AT_LEAST - set(signed)) | {name for name in signed if name not in headers})
        missing += [n for n in headers if n.startswith("x-acs-") and n not in signed]
        if missing:
            raise refused("IncompleteSignature", f"These headers are not signed: {', '.join(missing)}.")
        secret, who = self._owner(key)
        fits = hmac.compare_digest(headers["x-acs-content-sha256"], hashlib.sha256(request.body).hexdigest())
        expected = _mac(secret, acs3_string(request, signed), "sha256").hex()
        if not hmac.compare_digest(expected, signature) or not fits:
            raise refused("SignatureDoesNotMatch", "The signature is not that of this request and access key.")
        dated_ms = _in_time(_iso_ms(headers["x-acs-date"]), now_ms)
        self._first(("acs3", key, headers["x-acs-signature-nonce"]), dated_ms, now_ms)
        return who

    def _roa(self, request: Signed, key: str, signature: str, now_ms: int) -> Who:
        if not self.takes_sha1:
            why = "It does not cover the body."
            hint = "Use an SDK that signs with ACS3-HMAC-SHA256, or start the server with --pai-sha1."
            raise refused("UnsupportedSignatureMethod", "Signatures with HMAC-SHA1 are not taken here.", why, hint)
        secret, who = self._owner(key)
        strings = (roa_string(request), roa_string(request, empty="="))
        expected = [base64.b64encode(_mac(secret, text, "sha1")).decode() for text in strings]
        if not any(hmac.compare_digest(one, signature) for one in expected):
            raise refused("SignatureDoesNotMatch", "The signature is not that of this request and access key.")
        dated_ms = _in_time(_http_ms(request.headers.get("date", "")), now_ms)
        nonce = request.headers.get("x-acs-signature-nonce", "")
        if nonce:
            self._first(("roa", key, nonce), dated_ms, now_ms)
        elif request.method != "GET":  # some clients bring no nonce: the same write in the same second is one write
            self._first(("roa", key, signature, hashlib.sha256(request.body).hexdigest()), dated_ms, now_ms)
        return who

    def _owner(self, key: str) -> tuple[str, Who]:
        found = self.find(key)
        if found is None:
            raise refused("InvalidAccessKeyId.NotFound", "There is no such access key.")
        return found

    def _first(self, key: Sequence[str], dated_ms: int, now_ms: int) -> None:
        if not self.seen.once(key, dated_ms, now_ms):
            raise refused("SignatureNonceUsed", "A request with this nonce came before.")


def _in_time(at_ms: int | None, now_ms: int) -> int:
    if at_ms is None or abs(now_ms - at_ms) > WINDOW_MS:
        hint = "Set the clock, and sign each request anew."
        raise refused("InvalidTimeStamp.Expired", "The request's date is not within 15 minutes of now.", "", hint)
    return at_ms


def refused(code: str, what: str, why: str = "", hint: str = "") -> Refused:
    return Refused(what=what, why=why, hint=hint, code=code)


def acs3_string(request: Signed, signed: Sequence[str]) -> str:
    """The string to sign: method, raw path, query encoded anew, the signed headers, the hash of the body."""
    pairs = sorted(parse_qsl(request.query, keep_blank_values=True, strict_parsing=False))
    query = "&".join(f"{_encoded(name)}={_encoded(value)}" for name, value in pairs)
    lines = "".join(f"{name}:{request.headers[name].strip()}\n" for name in signed)
    body = request.headers["x-acs-content-sha256"]
    whole = "\n".join([request.method, request.path or "/", query, lines, ";".join(signed), body])
    return f"ACS3-HMAC-SHA256\n{hashlib.sha256(whole.encode()).hexdigest()}"


def authorization(request: Signed, key: str, secret: str) -> dict[str, str]:
    """The headers of the request, all of them signed, and the hash and the signature that belong to them."""
    headers = {**request.headers, "x-acs-content-sha256": hashlib.sha256(request.body).hexdigest()}
    names = sorted(headers)
    mac = _mac(secret, acs3_string(replace(request, headers=headers), names), "sha256").hex()
    said = f"ACS3-HMAC-SHA256 Credential={key},SignedHeaders={';'.join(names)},Signature={mac}"
    return {**headers, "authorization": said}


def roa_string(request: Signed, empty: str = "") -> str:
    """The string to sign of ROA V2: values of the query are decoded. `empty`: what follows the name of an empty one;
    here the SDKs differ, one writes `=` and the others nothing.
    """
    head = [request.method, *(request.headers.get(name, "") for name in ("accept", "content-md5", "content-type"))]
    head += [request.headers.get("date", "")]
    ours = sorted(name for name in request.headers if name.startswith("x-acs-"))
    lines = "".join(f"{name}:{request.headers[name]}\n" for name in ours)
    pairs = sorted(parse_qsl(request.query, keep_blank_values=True))
    query = "&".join(f"{name}={value}" if value else name + empty for name, value in pairs)
    return "\n".join(head) + "\n" + lines + request.path + (f"?{query}" if query else "")


def _encoded(text: str) -> str:
    return quote(text, safe="-_.~")


def _mac(secret: str, text: str, digest: str) -> bytes:
    return hmac.new(secret.encode(), text.encode(), digest).digest()


def _iso_ms(text: str) -> int | None:
    try:
        return int(datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp() * 1000)
    except ValueError:
        return None


def _http_ms(text: str) -> int | None:
    try:
        return int(parsedate_to_datetime(text).timestamp() * 1000)
    except (ValueError, TypeError):
        return None
