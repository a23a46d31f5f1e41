"""A replay as one page that needs nothing else: pictures drawn here, figures as tables below them. The one rule kept:
every picture says in a sentence what it shows, and its numbers can be read without it.
"""

from collections.abc import Mapping, Sequence
from html import escape

from sublet.sim.drawing import Series, Spread, bars, heat_map, spreads, stacked_areas
from sublet.sim.metrics import Replayed
from sublet.sim.series import DAY_MS, SHARES, lending, losses_by_day, losses_by_quota, use_over_time, waits_by_quota

TICKS = (
    (0.0, "0"),
    (10.0, "10s"),
    (60.0, "1m"),
    (600.0, "10m"),
    (3600.0, "1h"),
    (21600.0, "6h"),
    (86400.0, "1d"),
    (604800.0, "7d"),
)

NAMES: Mapping[str, str] = {
    "jobs": "jobs counted",
    "runs": "starts",
    "queue_mean_s": "waiting, mean",
    "queue_p50_s": "waiting, half of the jobs at most",
    "queue_p95_s": "waiting, 95 % of the jobs at most",
    "jct_mean_s": "submission to end, mean",
    "quota_wait_mean_s": "waiting for the own quota, mean",
    "quota_wait_p99_s": "waiting for the own quota, 99 % of the jobs at most",
    "evictions": "evictions",
    "evictions_per_run": "evictions per start",
    "evictions_per_borrowed_run": "evictions per start on borrowed capacity",
    "lost_gpu_h": "GPU-hours lost",
    "lost_share": "share of all GPU-hours lost",
    "allocation": "GPUs allocated",
    "borrowed_share": "of which borrowed",
    "wall_s": "the replay itself took",
    "events": "events replayed",
}

STYLE = """
:root { color-scheme: light dark; --own: #2f6fab; --borrowed: #e08a1e; --free: #d9dde2; --lost: #b3423a; --ink: #1d2329;
  --soft: #5b6670; --line: #e3e6ea; --paper: #fff; }
@media (prefers-color-scheme: dark) { :root { --own: #5b9bd8; --borrowed: #f0a94a; --free: #3a424b; --lost: #e0756c;
  --ink: #e6e9ec; --soft: #a0a9b2; --line: #363d45; --paper: #171b1f; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 900px;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem }
h2 { font-size: 1.1rem; margin: 2rem 0 .25rem } p { margin: .25rem 0 .5rem }
svg { width: 100%; height: auto; display: block } svg text { font: 11px system-ui, sans-serif; fill: var(--ink) }
svg .tick { fill: var(--soft) } svg .dark { fill: var(--paper) } .grid { stroke: var(--line) }
.own, .mark0 { fill: var(--own) } .borrowed { fill: var(--borrowed) } .free { fill: var(--free) }
.lost { fill: var(--lost) }
.mark0 { fill-opacity: 1 } .mark1 { fill: var(--own); fill-opacity: .6 } .mark2 { fill: var(--own); fill-opacity: .35 }
.mark3 { fill: var(--own); fill-opacity: .18 } .heat { fill: var(--borrowed) }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .5rem 0 }
th, td { text-align: right; padding: .15rem .75rem .15rem 0; border-bottom: 1px solid var(--line); font-weight: normal }
th:first-child, td:first-child { text-align: left } thead th { color: var(--soft) }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .8em; vertical-align: -1px }
.soft, summary { color: var(--soft) }
"""


def report(title: str, policy: str, replayed: Replayed, metrics: Mapping[str, float]) -> str:
    """The whole page as HTML text."""
    sections = [summary(metrics), use_section(replayed), wait_section(replayed), loss_section(replayed)]
    sections.append(lending_section(replayed))
    warm = replayed.warm_up_ms / DAY_MS
    lead = f"{len(replayed.jobs):,} jobs on {replayed.capacity:,} GPUs, policy {policy}."
    if warm:
        lead += f" The first {warm:g} days warm up: they are drawn, and not counted in the figures."
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
            f"<h1>{escape(title)}</h1><p class='soft'>{escape(lead)}</p>",
            *sections,
            "</main></body></html>",
            "",
        ]
    )


def section(heading: str, sentence: str, *parts: str) -> str:
    return "\n".join([f"<section><h2>{escape(heading)}</h2><p>{sentence}</p>", *parts, "</section>"])


def key(style: str, words: str) -> str:
    square = f'<rect width="8" height="8" class="{style}"/>'
    return f'<svg class="key" viewBox="0 0 8 8" aria-hidden="true">{square}</svg>{escape(words)}'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = "".join(f"<th scope='col'>{escape(each)}</th>" for each in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(each)}</td>" for each in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def folded(words: str, inner: str) -> str:
    return f"<details><summary>{escape(words)}</summary>{inner}</details>"


def summary(metrics: Mapping[str, float]) -> str:
    rows = [[NAMES[key], figure(key, metrics[key])] for key in NAMES]
    return table(["figure", "value"], rows)


def figure(key: str, value: float) -> str:
    """A metric as people read it; its key says its unit."""
    if key == "wall_s":
        return f"{value:.1f} s"
    if key.endswith("_s"):
        return duration(value)
    if key.endswith("share") or key == "allocation":
        return f"{100 * value:.1f} %"
    if key.startswith("evictions_per"):
        return f"{value:.3f}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    for unit, name in ((86_400, "d"), (3600, "h"), (60, "m")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.1f} s"


def use_section(replayed: Replayed) -> str:
    use = use_over_time(replayed)
    days = use.slot_ms * len(use.own) / DAY_MS
    series = [
        Series(label="under guaranteed leases", style="own", values=use.own),
        Series(label="borrowed", style="borrowed", values=use.borrowed),
        Series(label="free", style="free", values=use.free),
    ]
    legend = f"<p>{key('own', 'own quota')}{key('borrowed', 'borrowed')}{key('free', 'free')}</p>"
    picture = stacked_areas("GPUs by who holds them, over time", series, days)
    rows = [[f"{day:.1f}", *(f"{value:.0f}" for value in values)] for day, *values in thinned(days, series)]
    numbers = folded("The numbers", table(["day", "own", "borrowed", "free"], rows))
    return section(
        "Who held the GPUs", "GPUs in use until the last arrival, by kind of lease.", legend, picture, numbers
    )


def thinned(days: float, series: Sequence[Series], rows: int = 20) -> list[tuple[float, ...]]:
    count = len(series[0].values)
    places = range(0, count, max(1, count // rows))
    return [(days * place / count, *(each.values[place] for each in series)) for place in places]


def wait_section(replayed: Replayed) -> str:
    waits = waits_by_quota(replayed)
    marks = [f"{share} % of jobs at most" for share in SHARES]
    picture = spreads(
        "Waiting time by quota",
        [Spread(label=name, values=values) for name, (_, values) in waits.items()],
        marks,
        TICKS,
    )
    legend = "<p>" + "".join(key(f"mark{index}", mark) for index, mark in enumerate(marks)) + "</p>"
    rows = [[name, f"{count:,}", *(duration(value) for value in values)] for name, (count, values) in waits.items()]
    numbers = folded("The numbers", table(["quota", "jobs", *marks], rows))
    return section("How long jobs waited", "All waiting of a job, those after evictions too.", legend, picture, numbers)


def loss_section(replayed: Replayed) -> str:
    evictions, lost = losses_by_day(replayed)
    days = float(len(evictions))
    per_quota = losses_by_quota(replayed)
    rows = [[name, f"{count:,}", f"{hours:,.1f}"] for name, (count, hours) in per_quota.items()]
    return section(
        "What lending cost the borrowers",
        "Evictions, and GPU-hours of work done again and of restarts, by day.",
        "<p class='soft'>Evictions a day</p>",
        bars("Evictions by day", Series(label="evictions", style="borrowed", values=evictions), days),
        "<p class='soft'>GPU-hours lost a day</p>",
        bars("GPU-hours lost by day", Series(label="GPU-hours lost", style="lost", values=lost), days),
        folded("By quota of the evicted job", table(["quota", "evictions", "GPU-hours lost"], rows)),
    )


def lending_section(replayed: Replayed) -> str:
    names, lent = lending(replayed)
    picture = heat_map("GPU-hours lent, from row to column", names, lent, "GPU-hours")
    rows = [
        [lender, borrower, f"{lent[row][column]:,.1f}"]
        for row, lender in enumerate(names)
        for column, borrower in enumerate(names)
        if lent[row][column] >= 0.05
    ]
    rows.sort(key=lambda row: -float(row[2].replace(",", "")))
    numbers = folded("The numbers", table(["lender", "borrower", "GPU-hours"], rows))
    words = "GPU-hours under idle leases, from the lender (row) to the borrower's quota (column), as told at the grant."
    return section("Who lent to whom", words, picture, numbers)
