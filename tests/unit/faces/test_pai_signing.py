"""Signatures of PAI's clients, against recorded requests, and everything that must not pass."""

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from sublet.domain.errors import Refused
from sublet.faces.pai.signing import WINDOW_MS, Signed, Verifier, acs3_string, roa_string

# a request that the official SDK sent to a stub
BODY = (
    '{"DisplayName":"idle-job 中文","Envs":{"A":"b"},"JobMaxRunningTimeMinutes":60,"JobSpecs":[{"ElasticSpotSpecs":[],'
    '"Image":"img","LocalMountSpecs":[],"PodCount":2,"ResourceConfig":{"CPU":"4","GPU":"1","Memory":"8Gi",'
    '"SharedMemory":"4Gi"},"StartupDependencies":[],"Type":"Worker"}],"JobType":"PyTorchJob","Priority":1,'
    '"ResourceId":"quota1","Settings":{"EnableErrorMonitoringInAIMaster":true,"ErrorMonitoringArgs":'
    '"--job-execution-mode Sync --enable-job-restart True --max-num-of-job-restart 3 --fault-tolerant-policy '
    'ExitCodeAndErrorMsg","OversoldType":"ForceQuotaOverSold","Tags":{"t":"v"}},"UserCommand":"python train.py",'
    '"WorkspaceId":"1"}'
).encode()
HEADERS = {
    "accept": "application/json",
    "content-type": "application/json; charset=utf-8",
    "host": "127.0.0.1:37649",
    "user-agent": "AlibabaCloud (Linux; x86_64) Python/3.11.7 Core/0.4.3 TeaDSL/2",
    "x-acs-action": "CreateJob",
    "x-acs-content-sha256": "506c7a365a39a23c776a3b7f6d6287ad7b73970ae82d534eba3c7eb354baa45d",
    "x-acs-credentials-provider": "static_ak",
    "x-acs-date": "2026-12-01T04:30:35Z",
    "x-acs-signature-nonce": "fcd49ca74f0ef3f44d892f280e9167f5",
    "x-acs-version": "2020-12-03",
}
SIGNATURE = "e2f68fff621d9e1401c458874358564b7c7bb61c543a029557a041a629dedae6"
NOW_MS = int(datetime(2026, 12, 1, 4, 30, 35, tzinfo=UTC).timestamp() * 1000)


def recorded(**changes: object) -> Signed:
    said = f"ACS3-HMAC-SHA256 Credential=LTAIlocalak,SignedHeaders={';'.join(HEADERS)},Signature={SIGNATURE}"
    request = Signed(
        method="POST", path="/api/v1/jobs", query="", headers={**HEADERS, "authorization": said}, body=BODY
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def with_headers(request: Signed, **changes: str | None) -> Signed:
    headers = {**request.headers, **{name.replace("_", "-"): value for name, value in changes.items()}}
    return replace(request, headers={name: value for name, value in headers.items() if value is not None})


def signed_anew(request: Signed, secret: str = "local-secret") -> Signed:
    """As an SDK would sign it."""
    names = sorted(name for name in request.headers if name not in ("authorization", "accept-encoding"))
    headers: Mapping[str, str] = {**request.headers, "x-acs-content-sha256": hashlib.sha256(request.body).hexdigest()}
    request = replace(request, headers=headers)
    mac = hmac.new(secret.encode(), acs3_string(request, names).encode(), "sha256").hexdigest()
    said = f"ACS3-HMAC-SHA256 Credential=LTAIlocalak,SignedHeaders={';'.join(names)},Signature={mac}"
    return with_headers(request, authorization=said)


def verifier(**more: bool) -> Verifier[str]:
    return Verifier(find=lambda key: ("local-secret", "mei") if key == "LTAIlocalak" else None, **more)


def code_of(request: Signed, found: Verifier[str] | None = None, now_ms: int = NOW_MS) -> str:
    with pytest.raises(Refused) as refusal:
        (found or verifier()).who(request, now_ms)
    return refusal.value.code


def test_the_recorded_request_is_known_by_its_signature() -> None:
    string = "ACS3-HMAC-SHA256\na966f9413ab8bdc902e605faf02e4657494c781a8dec898f746e00976646cb51"
    assert acs3_string(recorded(), list(HEADERS)) == string
    assert verifier().who(recorded(), NOW_MS) == "mei"


def test_a_request_counts_once() -> None:
    found = verifier()
    found.who(recorded(), NOW_MS)
    assert code_of(recorded(), found) == "SignatureNonceUsed"
    assert code_of(recorded(), found, NOW_MS + WINDOW_MS) == "SignatureNonceUsed"
    assert code_of(recorded(), found, NOW_MS + WINDOW_MS + 1) == "InvalidTimeStamp.Expired"
    assert found.who(signed_anew(with_headers(recorded(), x_acs_signature_nonce="another")), NOW_MS) == "mei"


def test_a_wrong_signature_uses_up_no_nonce() -> None:
    found = verifier()
    assert code_of(recorded(body=BODY + b" "), found) == "SignatureDoesNotMatch"
    assert found.who(recorded(), NOW_MS) == "mei"


@pytest.mark.parametrize("off_ms", [-WINDOW_MS - 1, WINDOW_MS + 1, 10 * WINDOW_MS])
def test_an_old_or_early_request_is_refused(off_ms: int) -> None:
    assert code_of(recorded(), now_ms=NOW_MS + off_ms) == "InvalidTimeStamp.Expired"


@pytest.mark.parametrize(
    "altered",
    [
        recorded(method="PUT"),
        recorded(path="/api/v1/jobs/"),
        recorded(query="A=b"),
        recorded(body=BODY.replace(b"quota1", b"quota2")),
        with_headers(recorded(), host="127.0.0.1:1"),
        with_headers(recorded(), x_acs_version="2022-01-12"),
        with_headers(recorded(), x_acs_date="2026-12-01T04:30:36Z"),
        with_headers(recorded(), x_acs_content_sha256="0" * 64),
        signed_anew(recorded(), secret="guessed"),
    ],
)
def test_an_altered_request_is_refused(altered: Signed) -> None:
    assert code_of(altered) == "SignatureDoesNotMatch"


def test_what_decides_must_be_signed() -> None:
    assert code_of(with_headers(recorded(), authorization=None)) == "IncompleteSignature"
    assert code_of(with_headers(recorded(), authorization="Bearer x")) == "IncompleteSignature"
    assert code_of(with_headers(recorded(), x_acs_signature_nonce=None)) == "IncompleteSignature"
    assert code_of(with_headers(recorded(), x_acs_security_token="slipped in")) == "IncompleteSignature"
    assert code_of(signed_anew(with_headers(recorded(), x_acs_date=None))) == "IncompleteSignature"
    stranger = recorded().headers["authorization"].replace("LTAIlocalak", "LTAIother")
    assert code_of(with_headers(recorded(), authorization=stranger)) == "InvalidAccessKeyId.NotFound"


def test_a_query_and_a_path_are_signed_as_they_are_encoded_on_the_wire() -> None:
    request = recorded(method="GET", path="/api/v1/jobs/nope%20x%2Fy", query="DisplayName=a+b%2Bc*~&Empty=", body=b"")
    assert verifier().who(signed_anew(request), NOW_MS) == "mei"


OLD = Signed(
    method="GET",
    path="/api/v1/jobs",
    query="ShowOwn=False&DisplayName=a+b%2Bc%2A~",
    headers={
        "accept": "application/json",
        "date": "Tue, 01 Dec 2026 04:23:41 GMT",
        "x-acs-action": "ListJobs",
        "x-acs-credentials-provider": "static_ak",
        "x-acs-signature-method": "HMAC-SHA1",
        "x-acs-signature-nonce": "c42902bccdec5cdb4aa449c56facef5e",
        "x-acs-signature-version": "1.0",
        "x-acs-version": "2020-12-03",
    },
    body=b"",
)
OLD_STRING = (
    "GET\napplication/json\n\n\nTue, 01 Dec 2026 04:23:41 GMT\nx-acs-action:ListJobs\n"
    "x-acs-credentials-provider:static_ak\nx-acs-signature-method:HMAC-SHA1\n"
    "x-acs-signature-nonce:c42902bccdec5cdb4aa449c56facef5e\nx-acs-signature-version:1.0\nx-acs-version:2020-12-03\n"
    "/api/v1/jobs?DisplayName=a b+c*~&ShowOwn=False"
)


def old(request: Signed = OLD, secret: str = "local-secret") -> Signed:
    import base64

    mac = hmac.new(secret.encode(), roa_string(request).encode(), "sha1").digest()
    return with_headers(request, authorization=f"acs LTAIlocalak:{base64.b64encode(mac).decode()}")


def test_the_older_scheme_is_off_unless_it_is_allowed() -> None:
    at_ms = int(datetime(2026, 12, 1, 4, 23, 41, tzinfo=UTC).timestamp() * 1000)
    assert roa_string(OLD) == OLD_STRING
    assert code_of(old(), now_ms=at_ms) == "UnsupportedSignatureMethod"
    found = verifier(takes_sha1=True)
    assert code_of(replace(old(), query="ShowOwn=True"), found, at_ms) == "SignatureDoesNotMatch"
    assert code_of(old(secret="guessed"), found, at_ms) == "SignatureDoesNotMatch"
    assert found.who(old(), at_ms) == "mei"
    assert code_of(old(), found, at_ms) == "SignatureNonceUsed"
    assert code_of(old(), verifier(takes_sha1=True), at_ms + WINDOW_MS + 1) == "InvalidTimeStamp.Expired"


def test_a_write_without_a_nonce_counts_once_and_another_body_is_another_write() -> None:
    at_ms = int(datetime(2026, 12, 1, 4, 23, 41, tzinfo=UTC).timestamp() * 1000)
    plain = replace(with_headers(OLD, x_acs_signature_nonce=None), method="POST", body=b"{}")
    found = verifier(takes_sha1=True)
    assert found.who(old(plain), at_ms) == "mei"
    assert code_of(old(plain), found, at_ms) == "SignatureNonceUsed"
    assert found.who(old(replace(plain, body=b'{"a":1}')), at_ms) == "mei"
