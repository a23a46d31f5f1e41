"""The job file: every key does something, and everything else is refused with its line."""

from dataclasses import replace

import pytest

from sublet.domain.errors import Refused
from sublet.domain.jobs import CheckpointHint, FaultTolerance, IdlePolicy, JobRequest, Program
from sublet.service import jobkeys
from sublet.service.jobfile import Draft, Origin, parse

ORIGIN = Origin(job_id="job_1", user="mei", file="job.yaml", base="/home/mei")
SHORT = "quota: nlp\ngpu: 1\ncommand: python train.py\n"
WHOLE = """\
name: sft-70b
quota: nlp
idle: acceptable
priority: 7
spec: h100x8
instances: 4
resources: {gpu: 8, cpu: 1.5, memory: 800Gi}
launcher: torchrun
command: [train.py, --config, configs/sft.yaml]
workdir: sft
env: {NCCL_DEBUG: WARN, RANKS: 3}
max_time: 72h
checkpoint: {dir: "/ckpt/{job}", every: 10m, exit_code: 85}
fault_tolerance:
  mode: sync
  max_restarts: 0
  policy: on-failure
  same_error: 1
  backoff: {first: 10s, max: 5m}
  hang: {action: report, after: 30m, watch: [output, step]}
  exit_hang: 10m
  on_preempt: requeue
  grace: 60s
  notice: {signal: none, to: leader}
labels: {project: sft}
"""


def read(text: str, origin: Origin = ORIGIN, **overrides: object) -> JobRequest:
    return parse(text, origin, overrides).request


def test_the_shortest_file() -> None:
    program = Program(command=("python train.py",), workdir="/home/mei")
    assert read(SHORT) == JobRequest(
        id="job_1",
        user="mei",
        name="job",
        quota="nlp",
        specs=(),
        fault_tolerance=FaultTolerance(backoff_first_ms=10_000),
        program=program,
    )


def test_every_key() -> None:
    settings = (
        '{"checkpoint_exit_code":85,"exit_hang_ms":600000,"hang_action":"report","hang_after_ms":1800000,'
        '"hang_watch":["output","step"],"notice_signal":"none","notice_to":"leader","policy":"on-failure"}'
    )
    assert read(WHOLE) == JobRequest(
        id="job_1",
        user="mei",
        name="sft-70b",
        quota="nlp",
        idle=IdlePolicy.ACCEPTABLE,
        priority=7,
        specs=("h100x8",),
        sizes=(8, 8, 8, 8),
        cpu_milli=1500,
        memory_bytes=800 * 1024**3,
        fault_tolerance=FaultTolerance(
            policy="on_failure", max_restarts=0, same_error=1, backoff_first_ms=10_000, backoff_max_ms=300_000
        ),
        checkpoint=CheckpointHint(every_ms=600_000),
        grace_ms=60_000,
        max_time_ms=72 * 3_600_000,
        labels={"project": "sft"},
        program=Program(
            command=("train.py", "--config", "configs/sft.yaml"),
            workdir="/home/mei/sft",
            environment={"NCCL_DEBUG": "WARN", "RANKS": "3"},
            launcher="torchrun",
            checkpoint_dir="/ckpt/job_1",
            settings=settings,
        ),
    )


def test_json_is_read_by_the_same_rules() -> None:
    assert read('{"quota": "nlp", "gpu": 1, "command": "python train.py"}') == read(SHORT)


def test_overrides_win_over_the_file() -> None:
    request = read(WHOLE, gpu=2, instances=1, env={"NCCL_DEBUG": "INFO"})
    assert request.sizes == (2,)
    assert request.program.environment == {"NCCL_DEBUG": "INFO", "RANKS": "3"}


def test_a_list_of_one_is_a_program_and_no_shell_line() -> None:
    assert read("quota: q\ngpu: 1\ncommand: ['my program; rm']\n").program.command == ("'my program; rm'",)


@pytest.mark.parametrize(
    ("written", "command"),
    [
        ("train.py --fast", ("torchrun train.py --fast",)),
        ("torchrun train.py", ("torchrun train.py",)),
        ("[train.py]", ("torchrun train.py",)),
        ("[train.py, --fast]", ("train.py", "--fast")),
        ("[torchrun, train.py, --fast]", ("train.py", "--fast")),
        ("[torchrun, train.py]", ("torchrun train.py",)),
    ],
)
def test_torchrun_is_named_once(written: str, command: tuple[str, ...]) -> None:
    """A shell line has it in front; before the words of a program the engine puts it."""
    assert read(f"quota: q\ngpu: 1\nlauncher: torchrun\ncommand: {written}\n").program.command == command


def test_no_stop_where_people_ask_for_it() -> None:
    text = SHORT + "fault_tolerance: {on_preempt: stop, policy: never}\n"
    assert read(text).fault_tolerance == FaultTolerance(enabled=False, policy="never", backoff_first_ms=10_000)


def test_the_words_of_yaml_1_2_stay_words() -> None:
    assert read(SHORT + "labels: {on: no, off: yes}\n").labels == {"on": "no", "off": "yes"}


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("90s", 90_000), ("10m", 600_000), ("1h30m", 5_400_000), ("72h", 259_200_000), ("2d", 172_800_000), ("5ms", 5)],
)
def test_durations(text: str, milliseconds: int) -> None:
    assert read(SHORT + f"max_time: {text}\n").max_time_ms == milliseconds


@pytest.mark.parametrize(("text", "milli"), [("96", 96_000), ("0.5", 500), ("1.25", 1_250), ("500m", 500)])
def test_cores(text: str, milli: int) -> None:
    assert read(f"quota: q\nresources: {{gpu: 1, cpu: {text}}}\ncommand: x\n").cpu_milli == milli


@pytest.mark.parametrize(("text", "size"), [("1024", 1024), ("1Ki", 1024), ("2G", 2 * 10**9), ("1Ti", 1024**4)])
def test_sizes(text: str, size: int) -> None:
    assert read(f"quota: q\nresources: {{gpu: 1, memory: {text}}}\ncommand: x\n").memory_bytes == size


JOB = "quota: q\ngpu: 1\ncommand: x\n"
REFUSALS = [
    ("quota: q\ngpus: 1\ncommand: x\n", "gpus is not a known key. The nearest known key is gpu. Write gpu instead.", 2),
    (JOB + "idel: only\n", "idel is not a known key. The nearest known key is idle.", 4),
    (JOB + "max_restart: 2\n", "The nearest known key is fault_tolerance.max_restarts.", 4),
    ("quota: q\nresources:\n  gpu: 1\n  cpus: 2\n", "The nearest known key is resources.cpu.", 4),
    (JOB + "zzzz: 1\n", "zzzz is not a known key. Known here: name, quota, idle,", 4),
    (JOB + "image: a\n", "image is not done yet. Leave it out.", 4),
    ("quota: q\n\ngpu: 0\ncommand: x\n", "gpu is 0. It must be 1 to 1,024.", 3),
    ("quota: q\nresources:\n  gpu: -8\ncommand: x\n", "resources.gpu is -8. It must be 1 to 1,024.", 3),
    (f"quota: q\ngpu: {'9' * 30}\ncommand: x\n", f"gpu is {'9' * 30}. It must be 1 to 1,024.", 2),
    (f"quota: q\ngpu: {'9' * 300}\ncommand: x\n", "gpu is a number of more than 38 digits.", 2),
    (f"quota: q\ngpu: {'9' * 5000}\ncommand: x\n", "The file is no YAML mapping. Exceeds the limit", None),
    ("quota: q\ngpu: 1.5\ncommand: x\n", "gpu is 1.5, not a whole number.", 2),
    ("quota: q\ngpu: two\ncommand: x\n", "gpu is two, not a whole number.", 2),
    ("quota: q\ngpu: true\ncommand: x\n", "gpu is true, not a whole number.", 2),
    ("quota: q\ngpu: 1\nresources: {gpu: 1}\ncommand: x\n", "gpu and resources.gpu are both given.", 2),
    ("quota: q\ncommand: x\n", "gpu is missing. It says how many GPUs each instance gets.", None),
    ("quota: q\ngpu: 1\ninstances: 0\ncommand: x\n", "instances is 0. It must be 1 to 10,000.", 3),
    ("quota: q\ngpu: 1\ninstances: 1000000000\ncommand: x\n", "instances is 1000000000. It must be", 3),
    ("gpu: 1\ncommand: x\n", "quota is missing. A job cannot do without it. Name the quota", None),
    ("quota: ' '\ngpu: 1\ncommand: x\n", "quota is missing.", 1),
    ("quota: [a]\ngpu: 1\ncommand: x\n", "quota is a list, not a text.", 1),
    ("quota: q\ngpu: 1\n", "command is missing. It says what runs in each instance. Write command:", None),
    ("quota: q\ngpu: 1\ncommand: '  '\n", "command is empty. There is nothing to run.", 3),
    ("quota: q\ngpu: 1\ncommand: []\n", "command is no list of texts.", 3),
    ("quota: q\ngpu: 1\ncommand: ['']\n", "command is empty.", 3),
    ("quota: q\ngpu: 1\ncommand: {a: b}\n", "command is a mapping, not a text.", 3),
    (JOB + "priority: 10\n", "priority is 10. It must be 1 to 9.", 4),
    (JOB + "idle: olny\n", "idle is olny. It may be never, acceptable or only. Did you mean only?", 4),
    (JOB + "launcher: srun\n", "launcher is srun. It may be none, torchrun or mpi.", 4),
    (JOB + "fault_tolerance:\n  verdicts:\n    - {match: '(', is: network}\n", "is no regular expression.", 6),
    (JOB + "fault_tolerance:\n  verdicts:\n    - {match: x, is: bad luck}\n", "is is bad luck. It may be hardware,", 6),
    (JOB + "fault_tolerance:\n  verdicts:\n    - {is: network}\n", "match or exit_code: one of both is needed.", 6),
    (JOB + "max_time: 10\n", "max_time is 10, not a time with its unit. Write 10s or 10m.", 4),
    (JOB + "max_time: soon\n", "max_time is soon, not a time with its unit. Write it as 90s,", 4),
    (JOB + "max_time: 99999d\n", "More than ten years cannot be asked for.", 4),
    ("quota: q\nresources: {gpu: 1, memory: lots}\ncommand: x\n", "resources.memory is lots, not a size.", 2),
    ("quota: q\nresources: {gpu: 1, cpu: -1}\ncommand: x\n", "resources.cpu is -1, not a count of cores.", 2),
    (JOB + "env: {'A=B': c}\n", "A=B in env is no name.", 4),
    (JOB + "env: {A: true}\n", 'env.A is true, not a text. Write it as "true".', 4),
    (JOB + "name: \"a\\nb\"\n", "name is no name. A name is one line", 4),
    (JOB + "spec: []\n", "spec is no list of texts.", 4),
    (JOB + "fault_tolerance:\n  on_preempt: stop\n", "on_preempt: stop needs policy: never.", 5),
    (JOB + "fault_tolerance:\n  hang: {watch: gpu}\n", "fault_tolerance.hang.watch names gpu.", 5),
    (JOB + "fault_tolerance: yes please\n", "fault_tolerance is yes please, not a mapping.", 4),
    ("quota: q\nquota: p\n", 'The file is no YAML mapping. The parser says: found duplicate key "quota"', 2),
    ("quota: [q\n", "The file is no YAML mapping. The parser says: expected ',' or ']'", 2),
    ("- a\n", "The file is no YAML mapping. It holds no `key: value` lines.", None),
    ("", "The file is no YAML mapping. It holds no `key: value` lines.", None),
    ("[" * 900, "The file is no YAML mapping. It is nested too deeply.", None),
    ("[" * 5000, "The file is no YAML mapping. It has more than 1,000 brackets.", None),
    ("#" * 300_000, "The file is longer than 256 KiB.", None),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said", "line"), REFUSALS, ids=range(len(REFUSALS)))
def test_refused_with_the_line(text: str, said: str, line: int | None) -> None:
    with pytest.raises(Refused) as raised:
        read(text)
    assert said in str(raised.value)
    assert raised.value.where == ("job.yaml" if line is None else f"job.yaml:{line}")


def test_a_relative_workdir_needs_a_folder_to_start_from() -> None:
    elsewhere = Origin(job_id="job_1", user="mei")
    assert read(SHORT, elsewhere).program.workdir == ""
    with pytest.raises(Refused, match="workdir is here, a relative path"):
        read(SHORT + "workdir: here\n", elsewhere)
    assert read(SHORT + "workdir: /there\n", elsewhere).program.workdir == "/there"


def test_where_a_field_stands() -> None:
    short: Draft = parse(SHORT, ORIGIN)
    whole: Draft = parse(WHOLE, ORIGIN)
    assert short.place("resources.gpu") == "job.yaml:2"
    assert whole.place("resources.gpu") == "job.yaml:7"
    assert whole.place("fault_tolerance.backoff.max") == "job.yaml:19"
    assert short.place("spec") == "job.yaml"


def test_what_is_said_to_hold_without_a_key_does() -> None:
    """The reference's column of usual values: written out, they change nothing."""
    usual = {path: key.usual for path, key in jobkeys.KEYS.items() if key.usual and " " not in key.usual}
    assert len(usual) == 17
    written: dict[str, object] = {}
    for path, value in usual.items():
        *above, last = path.split(".")
        level: dict[str, object] = written
        for name in above:
            level = level.setdefault(name, {})  # type: ignore[assignment]
        level[last] = int(value) if value.isdigit() else value
    plain, full = read(SHORT), read(SHORT, **written)
    assert replace(full, program=replace(full.program, settings="")) == plain
    assert full.program.settings == (
        '{"checkpoint_exit_code":85,"exit_hang_ms":600000,"hang_action":"report","hang_after_ms":1800000,'
        '"notice_signal":"none","notice_to":"leader","policy":"exit-code-and-error"}'
    )
