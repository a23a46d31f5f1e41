"""AIMaster's argument strings, as people write them, become our keys; nothing in them is fatal."""

import json
from typing import Any

import pytest

from sublet.service.aimaster import KNOWN, parse
from sublet.service.jobfile import Origin
from sublet.service.jobfile import parse as parse_job

STRINGS: list[tuple[str, dict[str, Any]]] = [
    (
        "--job-execution-mode=Sync --enable-job-restart True --max-num-of-job-restart 10 --job-hang-interval 1800"
        " --fault-tolerant-policy OnFailure",
        {"mode": "sync", "max_restarts": 10, "hang": {"action": "report", "after": "1800s"}, "policy": "on-failure"},
    ),
    (
        "--job-execution-mode=Sync --enable-job-restart=True --enable-job-hang-detection=True --job-hang-interval=3600",
        {"mode": "sync", "hang": {"action": "restart", "after": "3600s"}},
    ),
    ("--execution-mode Async --max-num-of-same-error=4", {"mode": "async", "same_error": 4}),
    (
        "--enable-log-hang-detection true --log-hang-interval-in-seconds 60",
        {"hang": {"action": "restart", "after": "60s"}},
    ),
    (
        "--enable-pod-completed-detection=True --pod-completed-interval-in-seconds=120",
        {"exit_hang": "120s", "hang": {"action": "restart"}},
    ),
    ("--enable-job-exit-hang-detection False", {"exit_hang": "off"}),
    ("--enable-job-restart False", {"policy": "never"}),
    ("--enable-job-hang-detection", {"hang": {"action": "restart"}}),
    ("--fault-tolerant-policy=ExitCodeAndErrorMsg", {"policy": "exit-code-and-error"}),
    ("--fault-tolerant-policy 'ExitCode'", {"policy": "exit-code"}),
    ("--max_num_of_job_restart=3 --max-num-of-job-restart=5", {"max_restarts": 5}),
    ("", {}),
]


@pytest.mark.parametrize(("text", "keys"), STRINGS, ids=range(len(STRINGS)))
def test_what_people_write(text: str, keys: dict[str, Any]) -> None:
    found = parse(text)
    assert (dict(found.keys), found.unknown, found.warnings) == (keys, (), ())
    job = json.dumps({"quota": "q", "gpu": 1, "command": "x", "fault_tolerance": {"aimaster": text}})
    assert parse_job(job, Origin(job_id="job_1", user="mei")).request.quota == "q", "each is a legal job file"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("--enable-perftracker True", "--enable-perftracker True"),
        ("--job-restart-timeout=1000000", "--job-restart-timeout=1000000"),
        ("--shiny-new-thing 7", "--shiny-new-thing 7"),
        ("--max-num-of-job-restart many", "--max-num-of-job-restart many"),
        ("--fault-tolerant-policy=Sometimes", "--fault-tolerant-policy=Sometimes"),
        ("--job-hang-interval=-5", "--job-hang-interval=-5"),
        ("word", "word"),
        ("--shiny 'not closed", "--shiny 'not"),
    ],
)
def test_what_is_not_known_or_not_understood_is_kept_and_said(text: str, kept: str) -> None:
    found = parse(f"{text} --execution-mode Async" if "'" not in text else text)
    assert found.unknown[0] == kept and kept in found.warnings[0]
    assert "'" in text or found.keys == {"mode": "async"}, "the rest holds"


def test_what_is_written_beside_it_outweighs_it_and_warnings_reach_the_job() -> None:
    tolerance = {"aimaster": "--max-num-of-job-restart 10 --job-hang-interval 60 --what 1", "max_restarts": 2,
                 "hang": {"action": "restart"}}  # fmt: skip
    text = json.dumps({"quota": "q", "gpu": 1, "command": "x", "fault_tolerance": tolerance})
    request = parse_job(text, Origin(job_id="job_1", user="mei")).request
    settings = json.loads(request.program.settings)
    assert request.fault_tolerance.max_restarts == 2
    assert (settings["hang_action"], settings["hang_after_ms"]) == ("restart", 60_000)
    assert settings["aimaster_unknown"] == ["--what 1"] and "--what 1 is not known" in settings["warnings"][0]


def test_every_name_is_read_without_a_fault() -> None:
    for name in KNOWN:
        for value in ("", "True", "0", "99999999999999999999", "\u0665", "Sync", "{}"):
            parse(f"--{name} {value}")
