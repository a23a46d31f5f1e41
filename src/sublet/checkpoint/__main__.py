"""`python -m sublet.checkpoint`: the tools on the command line. Rule: one line a fact, exit 0 only if all is well.

Exit 2 for what you asked wrongly, 65 for what does not hold, 75 for what may go through later.
"""

import argparse
import json
import sys
from pathlib import Path

from sublet.checkpoint import tools
from sublet.checkpoint.errors import Broken, CheckpointError, Refused
from sublet.checkpoint.retention import Keep

EXIT_DAMAGED = 65


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="sublet checkpoint", description="Look at checkpoints and move them.")
    verbs = top.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("ls", "what is there"), ("verify", "read and prove every byte"), ("show", "one checkpoint in full"),
        ("diff", "what differs between two"), ("export", "write one as safetensors or torch"),
        ("import", "make one of a torch, safetensors or DCP checkpoint"), ("pin", "keep one for good"),
        ("unpin", "leave it to retention again"), ("gc", "delete what nobody needs"),
    ):  # fmt: skip
        each = verbs.add_parser(verb, help=text)
        each.add_argument("directory", type=Path)
        if verb in ("verify", "show", "export", "pin", "unpin"):
            default = {"verify": "all", "pin": None, "unpin": None}.get(verb, "newest")
            each.add_argument("which", nargs="?" if default else None, default=default, help="step, name or newest")
        if verb == "diff":
            each.add_argument("first")
            each.add_argument("second")
        if verb == "export":
            each.add_argument("--to", type=Path, required=True)
            each.add_argument("--format", choices=("safetensors", "torch"), default="safetensors")
        if verb == "import":
            each.add_argument("source", type=Path)
            each.add_argument("--format", choices=("torch", "safetensors", "dcp"), required=True)
            each.add_argument("--step", type=int, default=0)
        if verb == "gc":
            each.add_argument("--keep-last", type=int)
            each.add_argument("--keep-every", type=int, default=0)
            each.add_argument("--damaged", action="store_true")
            each.add_argument("--dry-run", action="store_true")
    return top


def carry_out(asked: argparse.Namespace) -> int:
    directory: Path = asked.directory
    if asked.verb == "ls":
        for row in tools.ls(directory):
            print(row_text(row))
    elif asked.verb == "verify":
        found = tools.check(directory, asked.which)
        for name, why in found:
            print(f"{name}  {why or 'holds'}")
        return EXIT_DAMAGED if any(why for _, why in found) else 0
    elif asked.verb == "show":
        print(json.dumps(tools.show(directory, asked.which), indent=2))
    elif asked.verb == "diff":
        found_differences = tools.diff(directory, asked.first, asked.second)
        for each in found_differences:
            print(f"{each.name}  {each.what}")
        return 1 if found_differences else 0
    elif asked.verb == "export":
        size = tools.export(directory, asked.which, asked.to, asked.format)
        print(f"{asked.to}  {size / 1e6:.1f} MB")
    elif asked.verb == "import":
        print(tools.bring_in(asked.source, directory, asked.format, step=asked.step))
    elif asked.verb in ("pin", "unpin"):
        print(tools.pin(directory, asked.which, on=asked.verb == "pin"))
    elif asked.verb == "gc":
        keep = Keep(last=asked.keep_last, every=asked.keep_every) if asked.keep_last else None
        for name in tools.gc(directory, keep, damaged=asked.damaged, dry=asked.dry_run):
            print(name)
    return 0


def row_text(row: tools.Row) -> str:
    if row.why:
        return f"{'-':>12} {'damaged':>10}  {row.name}  {row.why}"
    age = f"{row.age_ms // 60_000}m ago" if row.age_ms >= 120_000 else f"{row.age_ms // 1000}s ago"
    marks = (" pinned" if row.pinned else "") + (f" metric {row.metric:g}" if row.metric is not None else "")
    return f"{row.step:>12} {row.bytes / 1e6:>8.1f}MB  {row.name}  {age}  ranks {row.world}{marks}"


def main(words: list[str] | None = None) -> int:
    """Exit code; the one place where this package's errors end."""
    try:
        return carry_out(parser().parse_args(words))
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, Refused) else EXIT_DAMAGED if isinstance(error, Broken) else 75


if __name__ == "__main__":
    sys.exit(main())
