"""Answers of PAI's API: 200 with a RequestId, or an error with Code and Message.

One rule: a refusal of ours keeps its sentences and gets the code that PAI's clients know, where they know one.
"""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from sublet.domain.errors import Refused, SubletError, Unavailable

CODES: Mapping[str, tuple[int, str]] = {  # ours: (status, PAI's)
    "job_unknown": (404, "JobNotFound"),
    "job_ended": (400, "InvalidJobStatus"),
    "quota_unknown": (404, "QuotaNotFound"),
    "quota_in_use": (400, "QuotaInUse"),
    "node_unknown": (404, "NodeNotFound"),
    "node_lost": (400, "InvalidNodeStatus"),
    "not_permitted": (403, "Forbidden.RAM"),
    "foreign_origin": (403, "Forbidden"),
    "not_yet": (400, "UnsupportedParameter"),
    "too_long": (413, "RequestBodyTooLarge"),
}
STATUS: Mapping[str, int] = {
    "SignatureDoesNotMatch": 403,
    "InvalidAccessKeyId.NotFound": 404,
    "InvalidAction.NotFound": 404,
    "JobNotFound": 404,
    "PodNotFound": 404,
    "QuotaNotFound": 404,
    "WorkspaceNotFound": 404,
    "NodeNotFound": 404,
    "NotFound": 404,
    "TRAINING_JOB_INSTANCE_NOT_FOUND": 404,
}


def success(body: Mapping[str, Any], request_id: str) -> Response:
    return _json(200, {**body, "RequestId": request_id}, request_id)


def failure(error: SubletError, request_id: str) -> Response:
    status, code = _coded(error)
    return _json(status, {"Code": code, "Message": str(error), "RequestId": request_id}, request_id)


def _coded(error: SubletError) -> tuple[int, str]:
    if isinstance(error, Unavailable):
        return 503, "ServiceUnavailable"
    if not isinstance(error, Refused):
        return 500, "InternalError"
    if error.code in CODES:
        return CODES[error.code]
    if error.code[:1].isupper():  # one of PAI's own
        return STATUS.get(error.code, 400), error.code
    return 400, "InvalidParameter"


def _json(status: int, body: Mapping[str, Any], request_id: str) -> Response:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    headers = {"x-acs-request-id": request_id}
    return Response(text, status_code=status, media_type="application/json", headers=headers)
