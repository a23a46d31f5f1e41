"""What went wrong with a program that failed: a class, and the line that shows it.

Rule: a verdict rests on what is on disk, the exit code and the log, so that whoever asks later gets the same one.
A line further down this table never outweighs one further up: what a fault drags along (a broken pipe, a peer that is
gone) comes after what set it off.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from sublet.domain.faults import Fault

SAVED = 85  # the exit code of a program that saved on its notice, where the job names no other
TAIL_BYTES = 256 * 1024  # of the log that is looked at
MOST_EVIDENCE = 300  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A regular expression, looked for in each line, and what it is the sign of."""

    fault: Fault
    pattern: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`error`: two failures with the same text failed in the same way; numbers and addresses are left out of it."""

    fault: Fault
    evidence: str
    error: str

    def told(self) -> dict[str, str]:
        return {"verdict": self.fault.value, "evidence": self.evidence, "error": self.error}


def _signs(fault: Fault, *patterns: str) -> tuple[Sign, ...]:
    return tuple(Sign(fault=fault, pattern=pattern) for pattern in patterns)


SIGNS: tuple[Sign, ...] = (
    *_signs(
        Fault.HARDWARE,
        # Not 13, 31, 43, 45, 68, 69: they are mostly a program's own (illegal addresses and instructions).
        r"NVRM: Xid .*: (48|61|62|63|64|74|79|92|94|95|109|110|119|120|136|140|143|155|156)\b",
        r"NVRM: Xid .*: (14[4-9]|150),.*\bFatal\b",
        r"uncorrectable (NVLink|ECC) error",
        r"CUDA error: (uncorrectable|the launch (timed out|failed due to hardware)|hardware|unknown error)",
        r"GPU has fallen off the bus|GPU is lost|[Uu]nable to determine the device handle for GPU",
        r"cudaErrorECCUncorrectable|cudaErrorHardwareStackError|CUDA_ERROR_ECC_UNCORRECTABLE",
        r"CUDA error: (device is busy or unavailable|all CUDA-capable devices are busy)",
        r"CUDA driver initialization failed|CUDA initialization: CUDA (unknown error|driver)",
        r"system not yet initialized",
        r"\bMachine check events? logged|\[Hardware Error\]",
        r"row remapp(er|ing) failure|DBE \(double bit error\)",
        r"HIP error: (unspecified launch failure|hardware)",
    ),
    *_signs(
        Fault.OUT_OF_MEMORY,
        r"torch\.(cuda\.)?(OutOfMemoryError|AcceleratorError: CUDA error: out of memory)|CUDA out of memory",
        r"CUDA error: out of memory|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
        r"(CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED)",
        r"RESOURCE_EXHAUSTED: (Out of memory|Attempting to allocate|Failed to allocate)",
        r"\b(HIP|NPU|XPU|HPU|MPS|MUSA|MLU|GPU) (backend )?out of memory|[Oo]ut of memory\. Tried to allocate",
        r"\bResourceExhaustedError\b|OOM when allocating tensor",
        r"Out of memory: Kill(ed)? process|oom-kill:|Memory cgroup out of memory|oom_reaper: reaped process",
        r"DefaultCPUAllocator: (not enough memory|can't allocate memory)|^MemoryError\b|std::bad_alloc",
        r"Cannot allocate memory|\bArrayMemoryError\b|_ArrayMemoryError|memory allocation of \d+ bytes failed",
        r"OOMKilled|exceeded memory limit|Detected \d+ oom[_-]kill event",
    ),
    *_signs(
        Fault.INFRASTRUCTURE,
        r"No space left on device|Disk quota exceeded|\[Errno 28\]|\[Errno 122\]",
        r"Input/output error|OSError: \[Errno (5|14|19|108|112|121)\]",
        r"PytorchStreamWriter failed|inline_container\.cc:\d+\] \. (unexpected pos|file write failed)",
        r"Stale (NFS )?file handle|\[Errno 116\]",
        r"Read-only file system|\[Errno 30\]",
        r"Transport endpoint is not connected|\[Errno 107\]",
        r"nfs: server \S+ not responding",
        r"DataLoader worker .* is killed by signal: Bus error|out of shared memory|insufficient shared memory",
        r"Too many open files|\[Errno 24\]",
        r"(ErrImagePull|ImagePullBackOff|CreateContainerError|FailedMount|FailedScheduling|NodeNotReady)",
        r"(The node was low on resource|Evicted|DiskPressure|node .* is not ready)",
        r"driver/library version mismatch|no NVIDIA driver|libcuda\.so\.1: cannot open shared object file",
        r"CUDA driver version is insufficient for CUDA runtime version",
        r"No CUDA GPUs are available|no CUDA-capable device is detected|peer access is not supported between",
        r"failed \(exitcode: -(9|7)\) local_rank",  # torchrun on a rank that was killed; its peers see a reset
        r"NVML: (Driver|Unknown Error)|NVMLError_|nvidia-container-cli: (initialization|device) error",
    ),
    *_signs(
        Fault.HANG,
        r"Watchdog caught collective operation timeout",
        r"Some NCCL operations have failed or timed out|failed or timed out\. Due to the asynchronous nature of CUDA",
        r"DEADLINE_EXCEEDED: Barrier timed out|[Bb]arrier timed out",
        r"Monitored barrier .*did(n't| not) (reach|respond)|Rank \d+ failed to pass monitoredBarrier",
        r"Timed out waiting \d+ms for (recv|send) operation",
        r"HeartbeatMonitor|ProcessGroupNCCL's watchdog got stuck",
    ),
    *_signs(
        Fault.NETWORK,
        r"NCCL (WARN|error).*(\bIB\b|ib_|ibv_|socket|Socket|NET/|timeout|remote|unhandled system error)",
        r"ncclRemoteError|ncclSystemError|NCCL error|ncclInternalError|NCCL communicator was aborted",
        r"Got completion (from peer \S+ )?with (status|error)|local QP operation|transport retry counter exceeded",
        r"Connection (reset|closed|refused|timed out)|ConnectionResetError|ConnectionRefusedError|BrokenPipeError",
        r"Connection closed by peer|connection closed by remote peer",
        r"(Socket|socket)[ _]?[Tt]imeout|ReadTimeoutError|ConnectTimeout|connect\(\) timed out|read timeout=",
        r"DistNetworkError|DistStoreError|RendezvousConnectionError|RendezvousTimeoutError|TCPStore.*(timeout|failed)",
        r"\b(429 (Client Error|Too Many)|5\d\d Server Error|50[234] (Bad Gateway|Service Unavail|Gateway)|SlowDown)",
        r"EndpointConnectionError|Could not connect to the endpoint|Max retries exceeded|RemoteDisconnected",
        r"EOF occurred in violation of protocol|IncompleteRead|Connection broken|ServerDisconnected|ClientConnector",
        r"heartbeat timeout|UNAVAILABLE: |failed to connect to all|Couldn't communicate with backend|CommError",
        r"No route to host|Network is unreachable|Host is down|\[Errno (110|111|113|104|101)\]",
        r"Name or service not known|Temporary failure in name resolution|Could not resolve host",
        r"gloo.*(Connection|connect|timeout|Broken pipe)|Gloo connectFullMesh failed",
        r"UCX +ERROR|mlx5_\d+.*(error|failed)|link is down|port state changed to DOWN",
        r"store->get.*(failed|timeout)|wait timeout after \d+ms",
        r"SSH (error|connection)|ssh: connect to host|Host key verification failed|ORTE (was unable|has lost)",
    ),
)
_USER = _signs(
    Fault.USER_ERROR,
    r"device-side assert triggered",
    r"mat1 and mat2 shapes cannot be multiplied|size mismatch for|shape '.*' is invalid for input of size",
    r"The size of tensor a \(\d+\) must match|Sizes of tensors must match|stack expects each tensor to be equal size",
    r"Expected all tensors to be on the same device|expected scalar type|must be the same dtype",
    r"Trying to backward through the graph a second time|element 0 of tensors does not require grad",
    r"one of the variables needed for gradient computation has been modified by an inplace operation",
    r"Error\(s\) in loading state_dict|Unexpected key\(s\) in state_dict|Missing key\(s\) in state_dict",
    r"no kernel image is available for execution|invalid device ordinal|Invalid device id",
    r"Torch not compiled with CUDA enabled|not implemented for '(Half|BFloat16|Int|Long|Float|Bool)'",
    r"CUBLAS_STATUS_INVALID_VALUE|CUDNN_STATUS_BAD_PARAM|CUDNN_STATUS_NOT_SUPPORTED",
    r"can't open file '.*': \[Errno 2\]|unrecognized arguments:|the following arguments are required:|invalid choice:",
    r": error: (argument|ambiguous option)|syntax error near unexpected token|syntax error: unexpected end of file",
    r": line \d+: \w+: unbound variable$",
    r"(command )?not found$|: No such file or directory$|[Pp]ermission denied$|cannot execute|Exec format error",
    r"Expected to have finished reduction in the prior iteration|Default process group has not been initialized",
    r"InvalidGitRepositoryError|ConfigAttributeError|MissingMandatoryValue|ConfigKeyError|ValidationError: ",
    r"^Could not override '|^Key '.*' is not in struct|^In '.*': Could not find '",
    r"is not a local folder and is not a valid model identifier|does not appear to have a file named",
    r"CUDA_HOME environment variable is not set|the version (that was used to compile|torch was compiled with)",
)
# These only of the exception that ended the program, and not of one that speaks of a device: a job ends by them.
_USER_RAISED = _signs(
    Fault.USER_ERROR,
    r"[Ee]xpected (?!.*\bbytes\b).+ (but )?(got|found|received)\b",
    r"\bmust be (\d-?D|of type|a |an |the same|equal|positive|non-)|should be the same|Given groups=",
    r"[Dd]imension out of range|[Ii]ndex out of (range|bounds)|dimension specified as|The expanded size of the tensor",
    r"\b([Ss]hape|[Ss]ize|[Dd]type|[Dd]imension|[Tt]ype)s?\b.*(mismatch|do(es)? not match)|invalid (value|shape)",
    r"[Bb]oolean value of Tensor|a leaf [Vv]ariable|Only Tensors of floating point|not supported for",
    r"[Cc]annot be (converted|cast|broadcast|multiplied|re-initialized)|Can't (pickle|convert|get attribute)",
)
_OF_A_DEVICE = re.compile(r"(CUDA|HIP|cuDNN|CUBLAS) (error|failure)|NCCL|driver|checksum|hash")
# Uncaught, these say that the program is wrong, and will be when it starts again.
_EXCEPTIONS = re.compile(
    r"SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError|NameError|UnboundLocalError"
    r"|AttributeError|TypeError|ValueError|KeyError|IndexError|AssertionError|ZeroDivisionError"
    r"|NotImplementedError|RecursionError|FileNotFoundError|NotADirectoryError|IsADirectoryError"
    r"|FileExistsError|PermissionError|UnicodeDecodeError|UnicodeEncodeError|JSONDecodeError|YAMLError"
    r"|ScannerError|ParserError|OverflowError|LookupError|StopIteration|ConfigAttributeError"
    r"|HFValidationError|RepositoryNotFoundError|GatedRepoError|SafetensorError|UnpicklingError|PicklingError"
    r"|CUDAMismatchException|ConfigCompositionException|OverrideParseException|InterpolationKeyError"
    r"|CompilationError|EinopsError|Tracer\w+Error|ConcretizationTypeError|UnexpectedTracerError"
    r"|ArgumentError"
)
# Exceptions of a launcher tell that something else failed.
_LAUNCHERS = ("ChildFailedError", "CalledProcessError", "ProcessExitedException", "ProcessRaisedException")
_PREFIX = re.compile(r"^(\[(rank|default)?\d+\]:\s?|\[\d+,\d+\]<std(err|out)>:\s?|\(\w+ pid=\d+\)\s?)+")
_RAISED = re.compile(r"^((?:[A-Za-z_]\w*\.)*([A-Z]\w*))(?::\s|$)")
_CODES: dict[int, tuple[Fault, str]] = {
    126: (Fault.USER_ERROR, "exit code 126: the command may not be executed"),
    127: (Fault.USER_ERROR, "exit code 127: there is no such command"),
    245: (Fault.HANG, "exit code 245: a collective operation timed out"),
    255: (Fault.NETWORK, "exit code 255: the connection of the launcher broke"),
}
_SIGNALS = {129: "SIGHUP", 130: "SIGINT", 131: "SIGQUIT", 132: "SIGILL", 133: "SIGTRAP", 134: "SIGABRT", 135: "SIGBUS",
            136: "SIGFPE", 137: "SIGKILL", 138: "SIGUSR1", 139: "SIGSEGV", 140: "SIGUSR2", 141: "SIGPIPE",
            143: "SIGTERM"}  # fmt: skip


def diagnose(
    exit_code: int | None,
    tail: str,
    *,
    wishes: Mapping[str, Any] = MappingProxyType({}),
    oom_kills: int = 0,
) -> Verdict:
    """The verdict on a program that failed. `tail`: the end of its log.

    `wishes`: the job's settings; its `verdicts` come before ours, a list of {"match": regular expression} or
    {"exit_code": number}, each with {"is": class}.
    """
    own, own_codes = own_signs(wishes.get("verdicts", ()))
    lines = [line for raw in tail.splitlines() if (line := _PREFIX.sub("", raw).rstrip())]
    if exit_code is not None and exit_code in own_codes:
        return _verdict(own_codes[exit_code], f"exit code {exit_code}")
    if oom_kills:
        return _verdict(Fault.OUT_OF_MEMORY, "the kernel killed a process: the instance's memory limit was reached")
    return (
        _by_signs(lines, own)
        or _by_signs(lines, [sign for sign in SIGNS if sign.fault in (Fault.HARDWARE, Fault.OUT_OF_MEMORY)])
        or _by_raised(lines)
        or _by_signs(lines, SIGNS)
        or _by_code(exit_code, lines)
    )


def own_signs(verdicts: Iterable[Mapping[str, Any]]) -> tuple[list[Sign], dict[int, Fault]]:
    """ValueError for a class that there is not, re.error for an expression that is none."""
    signs, codes = [], {}
    for one in verdicts:
        fault = Fault(one["is"])
        if "match" in one:
            signs.append(Sign(fault=fault, pattern=re.compile(one["match"]).pattern))
        else:
            codes[int(one["exit_code"])] = fault
    return signs, codes


def ended_in_a_hang() -> Verdict:
    """Of a program that was ended because it hung."""
    return Verdict(fault=Fault.HANG, evidence="no progress: it was ended", error=Fault.HANG)


def saved_and_left(exit_code: int) -> Verdict:
    return Verdict(fault=Fault.PREEMPTED, evidence=f"exit code {exit_code}: it saved and left", error="")


def _by_signs(lines: Sequence[str], signs: Sequence[Sign]) -> Verdict | None:
    """The first class of the list that shows anywhere, with the last line that shows it."""
    for fault in dict.fromkeys(sign.fault for sign in signs):
        found = re.compile("|".join(f"(?:{sign.pattern})" for sign in signs if sign.fault is fault))
        for line in reversed(lines):
            if found.search(line):
                return _verdict(fault, line)
    return None


def _by_raised(lines: Sequence[str]) -> Verdict | None:
    """What the program says itself: a sure sign of a mistake in it, or the exception that it died of."""
    raised = _raised(lines)
    sure, of_exceptions = (
        re.compile("|".join(f"(?:{sign.pattern})" for sign in signs)) for signs in (_USER, (*_USER, *_USER_RAISED))
    )
    seen = (sure if _OF_A_DEVICE.search(raised) else of_exceptions).search(raised)
    is_mistake = raised and (seen or _EXCEPTIONS.fullmatch(_name_of(raised)))
    if is_mistake and not _is_of_the_world(raised):
        return _verdict(Fault.USER_ERROR, raised)
    if raised:
        return None
    for line in reversed(lines[-20:]):
        if sure.search(line) and not _is_of_the_world(line):
            return _verdict(Fault.USER_ERROR, line)
    return None


def _raised(lines: Sequence[str]) -> str:
    """The last line of the last traceback that is not a launcher's own; nothing when there is none."""
    for start in range(len(lines) - 1, -1, -1):
        is_syntax = lines[start].startswith('  File "') and (start == 0 or not lines[start - 1].startswith(" "))
        if not (lines[start].startswith("Traceback (most recent call last)") or is_syntax):
            continue
        for line in lines[start + 1 :]:
            match = _RAISED.match(line)
            if match and not line.startswith(" "):
                if match.group(2) in _LAUNCHERS or match.group(2) in ("SystemExit", "KeyboardInterrupt"):
                    break
                return line
    return ""


def _name_of(raised: str) -> str:
    match = _RAISED.match(raised)
    return match.group(2) if match else ""


def _is_of_the_world(line: str) -> bool:
    """An exception of Python that tells of a disk or of a network, whatever it is called."""
    found = _by_signs([line], SIGNS)
    return found is not None


def _by_code(exit_code: int | None, lines: Sequence[str]) -> Verdict:
    if exit_code is None:
        return _verdict(Fault.INFRASTRUCTURE, "nobody saw how it ended")
    if exit_code in _CODES:
        return _verdict(*_CODES[exit_code])
    name = _SIGNALS.get(exit_code, "")
    if exit_code == 137:
        return _verdict(Fault.INFRASTRUCTURE, "exit code 137: killed by SIGKILL from outside")
    if exit_code in (135, 143):
        return _verdict(Fault.INFRASTRUCTURE, f"exit code {exit_code}: ended by {name} from outside")
    return _verdict(Fault.UNKNOWN, f"exit code {exit_code}: ended by {name}" if name else _last_word(exit_code, lines))


def _last_word(exit_code: int, lines: Sequence[str]) -> str:
    """What it died of as far as it said: the exception, else the last line that speaks of an error."""
    speaks = re.compile(r"[Ee]rror|ERROR|[Ee]xception|[Ff]ailed|[Ff]atal|panic")
    said = _raised(lines) or next((line for line in reversed(lines[-20:]) if speaks.search(line)), "")
    return said or f"exit code {exit_code}"


def _verdict(fault: Fault, line: str) -> Verdict:
    evidence = line.strip()[:MOST_EVIDENCE]
    return Verdict(fault=fault, evidence=evidence, error=f"{fault}: {same_text(evidence)}")


def same_text(line: str) -> str:
    """The line without what differs from one time to the next: times, addresses, numbers, paths of instances."""
    text = re.sub(r"0x[0-9a-fA-F]+|\b[0-9a-f]{8,}\b", "#", line)
    text = re.sub(r"\d+", "#", text)
    return re.sub(r"#(?:[.:,\- /TZ]*#)+", "#", text)[:200]
