"""The reference is whole and current: what the code knows is documented, and what is documented the code knows."""

import importlib.util
import re
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import get_args

import click
import pytest

from sublet.domain.effects import Effect, StartGang
from sublet.domain.events import Event
from sublet.domain.ids import InstanceRef
from sublet.domain.jobs import JobRequest, JobState, Outcome, Program
from sublet.domain.leases import Lease, LeaseKind
from sublet.domain.reasons import ReasonCode
from sublet.domain.rules import Rules
from sublet.engines.environment import Meeting, environment_of
from sublet.service import clusterfile, story
from sublet.supervisor.processes import MARK

DOCS = Path(__file__).resolve().parents[2] / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_cells(page: str, heading: str = "") -> list[str]:
    """What stands in back quotes in the first column of the tables, of one part of the page or of all."""
    text = (DOCS / page).read_text("utf-8")
    if heading:
        text = re.split(r"(?m)^## ", text.partition(f"## {heading}\n")[2])[0]
    cells = re.findall(r"(?m)^\| ([^|]+) \|", text)
    return [word for cell in cells for word in re.findall(r"`([^`]+)`", cell)]


def same(documented: Iterable[str], known: Iterable[str]) -> None:
    first, second = sorted(documented), sorted(set(known))
    assert first == second, f"not documented: {set(second) - set(first)}; not known: {set(first) - set(second)}"


@pytest.mark.parametrize("page", ["cli.md", "job-file.md", "pai.md"])
def test_a_page_that_follows_from_the_code_is_current(page: str) -> None:
    assert (DOCS / "reference" / page).read_text("utf-8") == generator().pages()[page], "run `make docs`"


def test_every_command_and_every_option_has_words() -> None:
    commands = dict(generator().commands())
    assert {"up", "submit", "quota ls", "trace import", "demo"} <= set(commands)
    assert [name for name, command in commands.items() if not command.help] == []
    without = [
        f"{name} {option.opts[0]}"
        for name, command in commands.items()
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert without == []


def test_every_reason_is_documented() -> None:
    same(first_cells("reference/words.md", "Why a job waits"), [code.value for code in ReasonCode])


def test_every_event_and_effect_is_documented() -> None:
    text = (DOCS / "reference" / "words.md").read_text("utf-8")
    known = {one.__name__ for union in (Event, Effect) for one in get_args(union)}
    same(set(re.findall(r"`([A-Z][a-z]+[A-Z]?\w+)`", text)), known)


def test_every_kind_that_is_told_is_documented() -> None:
    """The kinds stand as the first text of what each teller gives."""
    source = Path(story.__file__).read_text("utf-8")
    kinds = set(re.findall(r'return "([a-z-]+)", (?:effect|event)\.|return "(rules)"', source))
    told = {kind for pair in kinds for kind in pair if kind} | {"preempted", "released"}
    told |= {outcome.value for outcome in (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.STOPPED)}
    documented = [
        word for word in first_cells("reference/words.md", "What `sublet events` tells") if not word[0].isupper()
    ]
    same(documented, told)


def test_every_state_and_outcome_is_documented() -> None:
    states = {state.value for state in JobState} | {"starting", "leaving", "stopping"}
    same(first_cells("reference/words.md", "States of a job"), states)
    outcomes = "What is told of an ended attempt or instance"
    same(first_cells("reference/words.md", outcomes), [outcome.value for outcome in Outcome])


def test_every_variable_of_a_program_is_documented() -> None:
    meeting = Meeting(port=1, secret="s")
    known = {MARK}  # set beside the others, by the supervisor
    for launcher, settings in (("none", ""), ("torchrun", ""), ("mpi", ""), ("none", '{"compat": "dlc"}')):
        program = Program(command=("x", "y"), launcher=launcher, settings=settings)
        request = JobRequest(id="job_a", quota="q", sizes=(1,), program=program)
        lease = Lease(kind=LeaseKind.IDLE, spec="s", nodes=("n",), gpus=(1,), granted_ms=0, lenders={})
        effect = StartGang(job="job_a", attempt=1, lease=lease, instances=(0,), request=request)
        ref = InstanceRef(job="job_a", attempt=1, instance=0)
        known |= set(environment_of(effect, ref, "/d/job_a/1/0", [0], meeting, ["127.0.0.1"]))
    same(first_cells("reference/program.md", "In its environment"), known)


def test_every_key_of_a_cluster_file_is_documented() -> None:
    rules = [item.name.removesuffix("_ms") for item in fields(Rules)]
    same(first_cells("howto/serve.md", "Describe the cluster"), [*clusterfile.NODE, *clusterfile.QUOTA, *rules])


def test_the_cluster_file_of_the_documentation_is_one() -> None:
    (text,) = re.findall(r"```yaml\n(# cluster\.yaml\n.*?)```", (DOCS / "howto/serve.md").read_text("utf-8"), re.S)
    cluster = clusterfile.parse(text, "cluster.yaml")
    assert cluster.nodes is not None and cluster.quotas is not None and cluster.rules == Rules(grace_ms=60_000)


def test_every_link_leads_somewhere() -> None:
    root = DOCS.parent
    pages = [*root.glob("*.md"), *DOCS.rglob("*.md"), *(root / "examples").rglob("*.md")]
    broken = [
        f"{page.relative_to(root)}: {target}"
        for page in pages
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_what_a_cluster_file_leaves_out_is_as_documented() -> None:
    """Written out, the column of usual values changes nothing."""
    text = (DOCS / "howto" / "serve.md").read_text("utf-8")
    rows = re.findall(r"(?m)^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| (`[^|]+`) \|", text)
    written = {
        key: value
        for keys, values in rows
        for key, value in zip(re.findall(r"`(.+?)`", keys), re.findall(r"`(.+?)`", values), strict=True)
    }
    quota = {key: value for key, value in written.items() if key in clusterfile.QUOTA}
    rules = {key: value for key, value in written.items() if key in clusterfile.RULES}
    assert set(rules) == set(clusterfile.RULES) and len(quota) == 5
    lines = ["quotas:", "  q:", *(f"    {key}: {value}" for key, value in quota.items())]
    lines += ["  r: {}", "rules:", *(f"  {key}: {value}" for key, value in rules.items())]
    cluster = clusterfile.parse("\n".join(lines))
    assert cluster.rules == Rules()
    assert cluster.quotas is not None
    first, second = cluster.quotas
    assert replace(first, name="r") == second
