"""What lending and reclaim do to waiting, evictions and lost work on job streams: a table and the frontier.

Replays each stream under every policy and with more and less kept back for owners, prints the tables, and with --into
writes them between the marks in a page and the frontier beside it as SVG. The one rule kept: nothing here decides; the
production scheduler with its shipped rules does, and only the named rule is changed.

    python benchmarks/lending.py philly=philly.csv,philly.yaml itp=itp.csv,itp.yaml [--known FILE.json] [--into PAGE.md]
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from sublet.domain.rules import Rules
from sublet.sim.metrics import measure
from sublet.sim.replay import Policy, Settings, replay
from sublet.sim.traces import read_cluster, read_stream

RESERVES = (0, 25, 50, 75, 100, 150, 300)  # percent of what owners lately took back
NAMED = (0, 25, 50, 100, 300)  # the others crowd the picture
SHIPPED = Rules().reserve_percent
BEGIN, END = "<!-- figures: made by benchmarks/lending.py -->", "<!-- figures: end -->"
FRONTIER = "lending-frontier.svg"
Results = dict[str, dict[str, dict[str, float]]]  # stream -> variant -> metrics

COLUMNS: Sequence[tuple[str, str]] = (
    ("jobs", "{:,.0f}"),
    ("runs", "{:,.0f}"),
    ("queue_mean_s", "{:,.0f}"),
    ("queue_p50_s", "{:,.0f}"),
    ("queue_p95_s", "{:,.0f}"),
    ("jct_mean_s", "{:,.0f}"),
    ("quota_wait_mean_s", "{:,.1f}"),
    ("quota_wait_p99_s", "{:,.0f}"),
    ("evictions", "{:,.0f}"),
    ("evictions_per_run", "{:.3f}"),
    ("evictions_per_borrowed_run", "{:.3f}"),
    ("lost_gpu_h", "{:,.0f}"),
    ("lost_share", "{:.4f}"),
    ("allocation", "{:.4f}"),
    ("borrowed_share", "{:.3f}"),
    ("wall_s", "{:.0f}"),
    ("events", "{:,.0f}"),
)


def variants() -> dict[str, Settings]:
    lend = Settings(policy=Policy.LEND)
    found = {"isolated": Settings(policy=Policy.ISOLATED), "no-reclaim": Settings(policy=Policy.NO_RECLAIM)}
    for percent in RESERVES:
        found[f"lend, {percent} % kept"] = replace(lend, rules=replace(lend.rules, reserve_percent=percent))
    return found


def run(streams: Mapping[str, tuple[Path, Path]], known: Path | None) -> Results:
    """Replay what is not known yet; what was found is kept in `known` after each replay."""
    results: Results = json.loads(known.read_text()) if known is not None and known.exists() else {}
    for name, (stream, cluster) in streams.items():
        jobs, nodes = read_stream(stream), read_cluster(cluster)
        for variant, settings in variants().items():
            if variant not in results.setdefault(name, {}):
                results[name][variant] = measure(replay(jobs, nodes, settings))
                print(f"{name}: {variant}", file=sys.stderr)
                if known is not None:
                    known.write_text(json.dumps(results))
    return results


def table(measured: Mapping[str, Mapping[str, float]]) -> str:
    names = [name for name in variants() if name in measured]
    head = [f"**{name}**" if name == f"lend, {SHIPPED} % kept" else name for name in names]
    lines = ["| | " + " | ".join(head) + " |", "|---" * (len(names) + 1) + "|"]
    for key, form in COLUMNS:
        lines.append(f"| `{key}` | " + " | ".join(form.format(measured[name][key]) for name in names) + " |")
    return "\n".join(lines)


def frontier(results: Results) -> Figure:
    """Waiting against evictions, one line a stream, one point for each share that is kept."""
    figure = Figure(figsize=(4.2 * len(results), 3.6), layout="constrained")
    for axis, (stream, measured) in zip(
        figure.subplots(1, len(results), squeeze=False)[0], results.items(), strict=True
    ):
        points = [(percent, measured[f"lend, {percent} % kept"]) for percent in RESERVES]
        xs = [found["evictions_per_borrowed_run"] for _, found in points]
        ys = [found["queue_mean_s"] for _, found in points]
        axis.plot(xs, ys, color="#2f6fab", marker="o", markersize=5)
        for (percent, _), x, y in zip(points, xs, ys, strict=True):
            if percent in NAMED:
                side, shift = ("right", -7) if percent > SHIPPED else ("left", 7)
                axis.annotate(f"{percent} %", (x, y), (shift, 3), textcoords="offset points", ha=side, fontsize=8)
            if percent == SHIPPED:
                axis.plot([x], [y], color="#e08a1e", marker="o", markersize=9)
        axis.axhline(measured["no-reclaim"]["queue_mean_s"], color="#999", linewidth=1, linestyle=":")
        axis.set_title(stream, fontsize=10)
        axis.set_xlabel("evictions per start on borrowed capacity")
        axis.set_ylabel("waiting, mean, s")
        axis.set_ylim(0, 1.1 * max(ys))
        axis.set_xlim(left=0)
        axis.spines[["top", "right"]].set_visible(False)
    return figure


def page_with(text: str, results: Results) -> str:
    """The page with new figures between the marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"The page lacks the marks {BEGIN} and {END}.")
    parts = [f"### {stream}\n\n{table(measured)}" for stream, measured in results.items()]
    words = "Dotted: the mean waiting when nothing is taken back. Orange: what is shipped."
    parts.append(f"![Waiting against evictions]({FRONTIER})\n\n{words}")
    return before + begin + "\n\n" + "\n\n".join(parts) + "\n\n" + end + after


def stream_of(text: str) -> tuple[str, tuple[Path, Path]]:
    name, _, files = text.partition("=")
    stream, _, cluster = files.partition(",")
    if not name or not cluster:
        raise argparse.ArgumentTypeError("Write NAME=STREAM.csv,CLUSTER.yaml.")
    return name, (Path(stream), Path(cluster))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Policies and the frontier of waiting against evictions.")
    parser.add_argument("streams", type=stream_of, nargs="+", metavar="NAME=STREAM.csv,CLUSTER.yaml")
    parser.add_argument("--known", type=Path, help="results of earlier runs; what is missing is added")
    parser.add_argument("--into", type=Path, help="the page to write the figures into")
    options = parser.parse_args(arguments)
    results = run(dict(options.streams), options.known)
    for stream, measured in results.items():
        print(f"{stream}\n\n{table(measured)}\n")
    if options.into is not None:
        options.into.write_text(page_with(options.into.read_text(), results))
        with rc_context({"svg.hashsalt": "sublet"}):  # the same figures give the same file
            frontier(results).savefig(options.into.parent / FRONTIER, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
