"""The keys of a job file: what each may say, what holds when it says nothing, what it is for.

One rule: this list is what the reader knows and what the reference prints, so that neither can forget a key.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sublet.service.reading import ANY, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """`usual`: what holds when it is left out; where it is a value of the key, as it would be written."""

    may_be: str
    text: str
    usual: str = ""


KEYS: Mapping[str, Key] = {
    "name": Key(may_be="a name", text="What people call the job.", usual="the name of the file"),
    "quota": Key(may_be="a quota", text="Who promises the capacity. Must be given."),
    "idle": Key(
        may_be="`never`, `acceptable`, `only`",
        text="Whether it may run on idle resources: not at all; on them or in its quota, whichever is free first; on "
        "nothing else.",
        usual="never",
    ),
    "priority": Key(may_be="1 to 9", text="9 first, among the jobs of its quota.", usual="5"),
    "spec": Key(may_be="a kind of node, or a list", text="Where it may run.", usual="what its quota is promised"),
    "instances": Key(may_be="1 to 10,000", text="How many; they start all or none.", usual="1"),
    "gpu": Key(may_be="1 to 1,024", text="GPUs of each instance; short for `resources.gpu`. One of both is needed."),
    "resources.gpu": Key(may_be="1 to 1,024", text="GPUs of each instance."),
    "resources.cpu": Key(may_be="`8`, `0.5`, `500m`", text="Cores of each instance.", usual="not counted"),
    "resources.memory": Key(may_be="`800Gi`, `64G`", text="Memory of each instance.", usual="not counted"),
    "launcher": Key(
        may_be="`none`, `torchrun`, `mpi`",
        text="What starts the program. With torchrun the rendezvous needs no flags; with mpi the command runs once for "
        "each GPU of all instances, under `mpirun`.",
        usual="none",
    ),
    "command": Key(
        may_be="a text or a list",
        text="What runs in each instance: a text is a line for the shell, a list a program and its arguments. Must be "
        "given.",
    ),
    "workdir": Key(may_be="a path", text="Where the program runs.", usual="the folder of the file"),
    "env": Key(may_be="names and texts", text="Variables for the program."),
    "compat": Key(
        may_be="`dlc`",
        text="Variables as PAI's DLC sets them: `WORLD_SIZE` and `RANK` count instances, not processes.",
        usual="as `launcher` says",
    ),
    "max_time": Key(
        may_be="`72h`",
        text="Running time at most, over all attempts; waiting does not count. Then it is stopped, and has failed.",
        usual="no limit",
    ),
    "checkpoint.dir": Key(
        may_be="a path",
        text="Where it keeps its checkpoints; `{job}` stands for its id. The program finds it in "
        "`SUBLET_CHECKPOINT_DIR`.",
        usual="a folder of the server's, the same for all attempts",
    ),
    "checkpoint.every": Key(
        may_be="`10m`",
        text="How often it saves, as far as is known before it says so itself; whoever has to leave is chosen by it.",
        usual="not known",
    ),
    "checkpoint.exit_code": Key(
        may_be="1 to 255", text="How the program ends when it has saved on a notice.", usual="85"
    ),
    "fault_tolerance.mode": Key(
        may_be="`sync`, `async`",
        text="After a failure the whole gang starts again, or the failed instance alone while the others go on.",
        usual="sync",
    ),
    "fault_tolerance.max_restarts": Key(
        may_be="0 or more",
        text="Failures it survives since its last new checkpoint. Preemptions, drains and lost nodes never count.",
        usual="3",
    ),
    "fault_tolerance.max_restarts_total": Key(
        may_be="0 or more", text="Failures it survives in all, new checkpoints or not.", usual="30"
    ),
    "fault_tolerance.policy": Key(
        may_be="`exit-code-and-error`, `exit-code`, `on-failure`, `never`",
        text="Which failures are followed by a restart. `on-failure`: all. `exit-code`: those by a signal, by 75 or "
        "85, or with a code above 128. `exit-code-and-error`: all but those that the log shows to be the program's own "
        "fault. `never`: none. A user's error is retried under `on-failure` alone.",
        usual="exit-code-and-error",
    ),
    "fault_tolerance.same_error": Key(
        may_be="1 or more",
        text="The same diagnosed error so often without a new checkpoint is final.",
        usual="2; under `on-failure` any number",
    ),
    "fault_tolerance.backoff.first": Key(
        may_be="`10s`", text="Pause after the second failure since its last new checkpoint; doubles.", usual="10s"
    ),
    "fault_tolerance.backoff.max": Key(may_be="`5m`", text="The longest pause.", usual="5m"),
    "fault_tolerance.hang.action": Key(
        may_be="`off`, `report`, `restart`", text="What follows from a hang.", usual="report"
    ),
    "fault_tolerance.hang.after": Key(
        may_be="`30m`",
        text="So long without progress is a hang. Less, once it is known how long the job's steps take.",
        usual="30m",
    ),
    "fault_tolerance.hang.start": Key(may_be="`30m`", text="The same, before the first step.", usual="as `after`"),
    "fault_tolerance.hang.save": Key(may_be="`30m`", text="The same, while it saves.", usual="as `after`"),
    "fault_tolerance.hang.watch": Key(
        may_be="`output`, `step`, or both", text="What counts as progress.", usual="`output` and `step`"
    ),
    "fault_tolerance.exit_hang": Key(
        may_be="`10m`, `off`",
        text="One instance is done and the others do not end: so long is too long.",
        usual="10m",
    ),
    "fault_tolerance.verdicts": Key(
        may_be="a list of `{match: expression, is: class}` or `{exit_code: 1, is: class}`",
        text="Signs of your own, looked for before ours. Classes: hardware, out_of_memory, user_error, "
        "infrastructure, hang, unknown, network.",
    ),
    "fault_tolerance.aimaster": Key(
        may_be="`--job-execution-mode=Sync --max-num-of-job-restart 10`",
        text="Arguments of PAI's AIMaster; keys that are written beside it outweigh them.",
    ),
    "fault_tolerance.on_preempt": Key(
        may_be="`requeue`, `stop`",
        text="What follows when it is preempted: it waits again with its first submit time, or it ends as stopped. "
        "`stop` needs `policy: never`.",
        usual="requeue",
    ),
    "fault_tolerance.grace": Key(
        may_be="`60s`",
        text="Time between the notice and the stop; never above the cluster's limit.",
        usual="what the cluster gives",
    ),
    "fault_tolerance.notice.signal": Key(
        may_be="`none`, `SIGUSR1`, `SIGTERM`", text="A signal that comes with the notice.", usual="none"
    ),
    "fault_tolerance.notice.to": Key(
        may_be="`leader`, `all`", text="Who gets that signal: the first process, or all.", usual="leader"
    ),
    "notify": Key(
        may_be="a list of `{to: webhook, on: [failed, hang]}`",
        text="Webhooks that are told of this job: failed, notice, preempted, hang, lost_progress; without `on` of all.",
    ),
    "labels": Key(may_be="names and texts", text="For people and their tools; Sublet keeps them."),
}
FREE = ("env", "labels")  # people choose the keys below these


def shape() -> Shape:
    """The keys as the reader checks them."""
    found: dict[str, Any] = {}
    for path in KEYS:
        *above, last = path.split(".")
        level = found
        for name in above:
            level = level.setdefault(name, {})
        level[last] = ANY if path in FREE else None
    return found
