"""What every instance finds in its environment, and the command line of its program. Rule: all in one place."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sublet.domain.effects import StartGang
from sublet.domain.ids import InstanceRef
from sublet.domain.jobs import Program
from sublet.supervisor.mpi import SECRET

DLC_PORT = 23456  # PAI's rendezvous port


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where the instances of an attempt find each other, and what only they know."""

    port: int
    secret: str


def program_argv(program: Program) -> list[str]:
    """One element is a line for the shell; several are the words of a command."""
    words = list(program.command)
    if program.launcher == "mpi":
        return [sys.executable, "-I", "-m", "sublet.supervisor", "--mpi", *words]
    command = ["/bin/sh", "-c", words[0]] if len(words) == 1 else words
    return ["torchrun", *words] if program.launcher == "torchrun" and len(words) > 1 else command


def environment_of(
    effect: StartGang,
    ref: InstanceRef,
    directory: str,
    devices: Sequence[int],
    meeting: Meeting,
    addresses: Sequence[str],
) -> dict[str, str]:
    """The user's own variables first, ours over them."""
    request, lease = effect.request, effect.lease
    position = ref.instance if len(effect.lease.nodes) > len(effect.instances) else effect.instances.index(ref.instance)
    ours = {
        "SUBLET_JOB_ID": ref.job,
        "SUBLET_JOB_NAME": request.name,
        "SUBLET_ATTEMPT": str(ref.attempt),
        "SUBLET_INSTANCE": str(ref.instance),
        "SUBLET_INSTANCES": str(len(effect.lease.nodes)),
        "SUBLET_GPUS": str(len(devices)),
        "SUBLET_HOSTS": ",".join(addresses),
        "SUBLET_IN_QUOTA": "1" if lease.kind == "guaranteed" else "0",
        "SUBLET_GRACE_SECONDS": str(effect.grace_ms // 1000),
        "SUBLET_NOTICE_FILE": f"{directory}/notice.json",
        "SUBLET_REPORT_FILE": f"{directory}/report.jsonl",
        "SUBLET_CHECKPOINT_DIR": checkpoint_directory(request.program.checkpoint_dir, ref.job, directory),
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, devices)),
        "PYTHONUNBUFFERED": "1",
    }
    gang = {"MASTER_ADDR": addresses[0], "MASTER_PORT": str(meeting.port)}
    return {
        **request.program.environment,
        **ours,
        **gang,
        **_launcher(request.program, position, effect, devices, gang),
        **({SECRET: meeting.secret} if request.program.launcher == "mpi" else {}),
    }


def checkpoint_directory(asked: str, job: str, directory: str) -> str:
    """`{job}` stands for the id. Without a wish it lies beside the instances, for all attempts of the job."""
    if asked:
        return asked.replace("{job}", job)
    return f"{directory.rsplit('/', 2)[0]}/checkpoints"


def settings_of(program: Program) -> dict[str, Any]:
    """What the job says to its supervisors."""
    settings: dict[str, Any] = json.loads(program.settings) if program.settings else {}
    return settings


def _launcher(
    program: Program, position: int, effect: StartGang, devices: Sequence[int], gang: Mapping[str, str]
) -> dict[str, str]:
    nodes, processes = str(len(effect.lease.nodes)), str(max(1, len(devices)))
    found: dict[str, str] = {}
    if settings_of(program).get("compat") == "dlc":
        found = {"WORLD_SIZE": nodes, "RANK": str(position), "NPROC_PER_NODE": processes}
    elif program.launcher == "none":
        found = {"WORLD_SIZE": nodes, "RANK": str(position), "LOCAL_RANK": "0"}
    if program.launcher == "torchrun":
        found |= {
            "PET_NNODES": nodes,
            "PET_NPROC_PER_NODE": processes,
            "PET_NODE_RANK": str(position),
            "PET_MASTER_ADDR": gang["MASTER_ADDR"],
            "PET_MASTER_PORT": gang["MASTER_PORT"],
            "PET_MAX_RESTARTS": "0",  # one restart authority: ours
        }
    return found
