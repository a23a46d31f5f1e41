"""Every domain value survives the way to JSON and back, and nothing else is let in."""

import json
from dataclasses import fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublet.domain import codec
from sublet.domain.changes import Entry
from sublet.domain.effects import EndJob, MarkQuota, QueueJob
from sublet.domain.events import JobStopAsked, JobSubmitted, Tick
from sublet.domain.jobs import JobRecord, JobRequest, JobState, Outcome
from sublet.domain.leases import Lease, LeaseKind


@pytest.mark.parametrize("name", sorted(codec.known_classes()))
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_class_comes_back_equal(name: str, data: st.DataObject) -> None:
    value = data.draw(st.from_type(codec.known_classes()[name]))
    text = codec.to_json(value)
    assert codec.from_json(text) == value
    assert codec.to_json(codec.from_json(text)) == text


@pytest.mark.parametrize("name", sorted(codec.known_classes()))
def test_no_field_hides_the_tag(name: str) -> None:
    assert codec.TAG not in {item.name for item in fields(codec.known_classes()[name])}


def test_the_spelling_of_an_event() -> None:
    text = codec.to_json(JobStopAsked(at_ms=7, job="job_a"))
    assert text == '{"type":"JobStopAsked","at_ms":7,"job":"job_a","user":""}'


def test_a_sequence_comes_back_as_a_tuple() -> None:
    effects = (QueueJob(job="job_a", quota="q", idle="only"), MarkQuota(quota="q", nominal={"b": 1, "a": 2}))
    assert codec.from_json(codec.to_json(effects)) == effects


def test_mappings_are_written_by_sorted_key() -> None:
    assert '{"a":2,"b":1}' in codec.to_json(MarkQuota(quota="q", nominal={"b": 1, "a": 2}))


def test_a_union_inside_carries_its_class() -> None:
    entry = Entry(sequence=1, event=Tick(at_ms=3), effects=())
    assert json.loads(codec.to_json(entry))["event"] == {"type": "Tick", "at_ms": 3}


def test_missing_keys_take_the_defaults() -> None:
    read = codec.from_json('{"type":"JobSubmitted","at_ms":1,"request":{"id":"job_a","quota":"q"}}')
    assert read == JobSubmitted(at_ms=1, request=JobRequest(id="job_a", quota="q"))


def test_nested_values_and_enums_come_back_as_themselves() -> None:
    lease = Lease(kind=LeaseKind.IDLE, spec="s", nodes=("n1",), gpus=(2,), granted_ms=5, lenders={"a": 2})
    record = JobRecord(request=JobRequest(id="job_a", quota="q"), state=JobState.RUNNING, submitted_ms=1, lease=lease)
    back = codec.from_json(codec.to_json(record))
    assert back == record
    assert type(back.state) is JobState and type(back.lease.kind) is LeaseKind and type(back.lease.nodes) is tuple


def test_text_of_any_kind_survives() -> None:
    ended = EndJob(job="job_a", outcome=Outcome.FAILED, failures=1, preemptions=0, why="\udcff \x00 ü 名")
    text = codec.to_json(ended)
    assert text.isascii() and codec.from_json(text) == ended


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"type":"Tick","at_ms":1,"colour":"red"}', "Tick has no field 'colour'"),
        ('{"type":"Tick"}', "Tick needs at_ms"),
        ('{"type":"Tick","at_ms":"1"}', "'1' is no int"),
        ('{"type":"Tick","at_ms":true}', "True is no int"),
        ('{"type":"Tack","at_ms":1}', "'Tack' is none of"),
        ('{"at_ms":1}', "names no type"),
        ("7", "names no type"),
        ('{"type":"JobSubmitted","at_ms":1,"request":[]}', r"\[\] is no JobRequest"),
        ('{"type":"JobSubmitted","at_ms":1,"request":{"id":"j","quota":"q","idle":"maybe"}}', "'maybe' is not a valid"),
        ('{"type":"Entry","sequence":1,"event":{"type":"Node"},"effects":[]}', "'Node' is none of Tick"),
    ],
)
def test_what_is_no_domain_value_is_refused(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        codec.from_json(text)


def test_a_class_of_others_is_refused() -> None:
    with pytest.raises(ValueError, match="object is no class of the domain"):
        codec.to_json(object())
