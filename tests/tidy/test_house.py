"""House rules that a machine can hold. Each is a function from source text to complaints, proven on a bad snippet."""

import ast
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "sublet").rglob("*.py"))
PURE = {  # what core and domain may import of the standard library
    "__future__", "bisect", "collections", "contextlib", "dataclasses", "enum", "functools", "hashlib", "heapq",
    "itertools", "json", "math", "operator", "re", "types", "typing",
}  # fmt: skip
EDGES = ("cli/", "supervisor/", "checkpoint/", "engines/", "client/", "demo/", "job.py", "store/", "__main__.py")
CLOCKS = {"time.time", "time.time_ns", "time.monotonic", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
CHANCE = {"random", "secrets", "uuid"}
MOST_LINES_OF_A_FILE = 600
MOST_LINES_OF_A_FUNCTION = 80


def name_of(path: Path) -> str:
    return path.relative_to(ROOT / "src" / "sublet").as_posix()


def is_pure(name: str) -> bool:
    return name.startswith(("core/", "domain/"))


def is_edge(name: str) -> bool:
    return name.startswith(EDGES)


def imported(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module


def impure_imports(name: str, text: str) -> list[str]:
    if not is_pure(name):
        return []
    own = ("sublet.domain", "sublet.core") if name.startswith("core/") else ("sublet.domain",)
    return [
        module
        for module in imported(ast.parse(text))
        if module.partition(".")[0] not in PURE and not module.startswith(own)
    ]


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def clocks_and_chance(name: str, text: str) -> list[str]:
    if is_edge(name):
        return []
    tree = ast.parse(text)
    calls = [dotted(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)]
    environment = ["os.environ" for node in ast.walk(tree) if dotted(node) == "os.environ"]
    chance = [] if name.startswith("sim/") else [m for m in imported(tree) if m.partition(".")[0] in CHANCE]
    return [call for call in calls if call in CLOCKS] + environment + chance


def forks(name: str, text: str) -> list[str]:
    found = [dotted(node) for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
    keywords = [node.arg for node in ast.walk(ast.parse(text)) if isinstance(node, ast.keyword)]
    return [one for one in found if one in ("os.fork", "os.forkpty")] + [k for k in keywords if k == "preexec_fn"]


def bare_excepts(name: str, text: str) -> list[str]:
    handlers = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ExceptHandler)]
    return [f"line {node.lineno}" for node in handlers if node.type is None]


def prints(name: str, text: str) -> list[str]:
    if name.startswith(("cli/", "demo/", "checkpoint/")):
        return []
    calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return [f"line {node.lineno}" for node in calls if dotted(node.func) == "print"]


def vague_names(name: str, text: str) -> list[str]:
    classes = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return [one for one in classes if re.search(r"(Manager|Helper|Utils?|Info|Data)$", one)]


def missing_docstring(name: str, text: str) -> list[str]:
    return [] if not text.strip() or ast.get_docstring(ast.parse(text)) else [name]


def too_long(name: str, text: str) -> list[str]:
    functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = [(f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions]
    found = [f"{one}: {count} lines" for one, count in lines if count > MOST_LINES_OF_A_FUNCTION]
    count = text.count("\n")
    return found + ([f"{count} lines"] if count > MOST_LINES_OF_A_FILE else [])


RULES: dict[Callable[[str, str], list[str]], tuple[str, str]] = {  # rule: a name and a text that break it
    impure_imports: ("core/x.py", "import threading"),
    clocks_and_chance: ("service/x.py", "import time\ntime.time()"),
    forks: ("engines/x.py", "import os\nos.fork()"),
    bare_excepts: ("service/x.py", "try:\n    f()\nexcept:\n    pass"),
    prints: ("service/x.py", "print(1)"),
    vague_names: ("core/x.py", "class JobManager: ..."),
    missing_docstring: ("core/x.py", "x = 1"),
    too_long: ("core/x.py", "def f():\n" + "    x = 1\n" * 90),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_holds(rule: Callable[[str, str], list[str]]) -> None:
    found = {name_of(path): rule(name_of(path), path.read_text("utf-8")) for path in SOURCES}
    assert {name: complaints for name, complaints in found.items() if complaints} == {}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_can_fail(rule: Callable[[str, str], list[str]]) -> None:
    assert rule(*RULES[rule])


def used_modules() -> set[str]:
    """All that is imported in the sources and benchmarks, and every `sublet.…` that stands in a string."""
    used: set[str] = set()
    for path in [*SOURCES, *(ROOT / "benchmarks").rglob("*.py")]:
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    parts = ["sublet", *name_of(path).removesuffix(".py").split("/")][: -node.level]
                    base = ".".join([*parts, base]).rstrip(".")
                used |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used |= set(re.findall(r"sublet(?:\.\w+)+", node.value))
    return used


ENTRIES = {"job", "core.check"}  # what user code imports; the invariants, which tests and simulations look at


def test_no_module_is_dead() -> None:
    used, modules = used_modules(), [name_of(path).removesuffix(".py").replace("/", ".") for path in SOURCES]
    kept = [m for m in modules if not m.endswith(("__init__", "__main__")) and "migrations" not in m]
    assert [m for m in kept if f"sublet.{m}" not in used and m not in ENTRIES] == []


def test_no_text_names_the_machine_it_was_written_on() -> None:
    machine = re.compile("/wo" + "rk/")
    kept = [p for folder in ("src", "docs", "tests", "benchmarks", "examples") for p in (ROOT / folder).rglob("*")]
    texts = [p for p in [*kept, *ROOT.glob("*.md")] if p.suffix in (".py", ".md", ".yaml", ".toml", ".svg", ".txt")]
    assert [str(p) for p in texts if machine.search(p.read_text("utf-8"))] == []
