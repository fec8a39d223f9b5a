"""The pictures and the one-file report that compare_methods.py draws from its measurements."""

import base64
import html
import statistics
from pathlib import Path

MEMORY = ("parameters", "gathered", "gradients", "optimizer", "activations")
# told apart by colour-blind eyes too (Paul Tol's bright)
COLOURS = ("#4477aa", "#aa3377", "#66ccee", "#ccbb44", "#ee6677")
MICRO_BATCHES_SHOWN = 4


def write_pictures(folder: Path, rows: list[dict], timelines: list[dict]) -> dict[str, Path]:
    """PNG files; returns {caption: path}."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    pictures = {
        "Which stage works on which micro-batch when (measured; light: forward, dark: backward).": _timelines,
        "Idle share of the stages: measured (mean of the stages) and (p-1)/(m+p-1).": _idle,
        "Memory of the fullest process by what it holds; the line is the cost model's sum.": _memory,
        "Seconds and bytes of a step, measured and predicted.": _costs,
    }
    paths = {}
    for caption, draw in pictures.items():
        figure = draw(rows, timelines)
        paths[caption] = folder / f"{draw.__name__.strip('_')}.png"
        figure.savefig(paths[caption], dpi=110)
    return paths


def _timelines(rows: list[dict], timelines: list[dict]):
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    shown = [t for t in timelines if t["schedule"] == "model parallel" or t["micro_batches"] == MICRO_BATCHES_SHOWN]
    figure = Figure(figsize=(9, 1.65 * len(shown)), layout="constrained")
    start_of = {id(t): min(event[3] for event in t["events"]) for t in shown}
    end = max(max(event[4] for event in t["events"]) - start_of[id(t)] for t in shown)
    for axes, timeline in zip(figure.subplots(len(shown), 1, sharex=True), shown, strict=True):
        for stage, kind, micro_batch, start, stop in timeline["events"]:
            shade = 0.35 if kind == "forward" else 0.75
            colour = colormaps[("Blues", "Oranges", "Greens", "Purples")[micro_batch % 4]](shade)
            left = (start - start_of[id(timeline)]) * 1e3
            width = (stop - start) * 1e3
            axes.barh(stage, width, left=left, height=0.85, color=colour, edgecolor="white", linewidth=0.6)
            axes.text(left + width / 2, stage, micro_batch + 1, ha="center", va="center", fontsize=7)
        idle, theory = statistics.mean(timeline["idle"]), timeline["theory"]
        axes.set_title(
            f"{timeline['schedule']}, {timeline['micro_batches']} micro-batch(es): "
            f"{idle:.0%} idle, theory {theory:.0%}",
            loc="left",
            fontsize=9,
        )
        stages = sorted({event[0] for event in timeline["events"]})
        axes.set_yticks(stages, [f"stage {stage + 1}" for stage in stages])
        axes.invert_yaxis()
        axes.set_xlim(0, end * 1e3)
    axes.set_xlabel("milliseconds")
    return figure


def _idle(rows: list[dict], timelines: list[dict]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.subplots()
    theory = sorted({(t["micro_batches"], t["theory"]) for t in timelines})
    axes.plot(*zip(*theory, strict=True), color="black", linewidth=1, label="(p-1)/(m+p-1), p = 4")
    schedules = sorted({timeline["schedule"] for timeline in timelines})
    for schedule, marker, colour in zip(schedules, "os^D", COLOURS, strict=False):
        points = [(t["micro_batches"], statistics.mean(t["idle"])) for t in timelines if t["schedule"] == schedule]
        axes.plot(*zip(*points, strict=True), marker, color=colour, label=schedule, markersize=6, alpha=0.85)
    axes.set_xscale("log", base=2)
    ticks = [micro_batches for micro_batches, _ in theory]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0, 1)
    axes.set_xlabel("micro-batches m")
    axes.set_ylabel("idle share of a stage")
    axes.legend(frameon=False)
    return figure


def _memory(rows: list[dict], timelines: list[dict]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.32 * len(rows) + 1), layout="constrained")
    axes = figure.subplots()
    for index, row in enumerate(rows):
        left = 0.0
        for kind, colour in zip(MEMORY, COLOURS, strict=True):
            width = row["measured"][kind] / 1e6
            axes.barh(index, width, left=left, color=colour, height=0.7, label=kind if index == 0 else None)
            left += width
        predicted = sum(row["predicted"][kind] for kind in MEMORY) / 1e6
        axes.plot([predicted] * 2, [index - 0.42, index + 0.42], color="black", linewidth=1.5)
    axes.set_yticks(range(len(rows)), [row["method"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("MB in the fullest process (black line: predicted)")
    axes.legend(frameon=False, loc="lower right")
    return figure


def _costs(rows: list[dict], timelines: list[dict]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.32 * len(rows) + 1), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, key, unit, scale in (
        (left, "seconds", "ms a step", 1e3),
        (right, "bytes_sent", "KB sent a step", 1e-3),
    ):
        for index, row in enumerate(rows):
            axes.barh(index - 0.2, row["measured"][key] * scale, height=0.38, color=COLOURS[0])
            axes.barh(index + 0.2, row["predicted"][key] * scale, height=0.38, color=COLOURS[3])
        axes.set_xlabel(unit)
    left.set_yticks(range(len(rows)), [row["method"] for row in rows])
    left.invert_yaxis()
    right.legend(["measured", "predicted"], frameon=False, loc="upper right")
    return figure


STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; font-size: 13px; margin: 1rem 0 }
th, td { padding: .25rem .6rem; text-align: right }
th:first-child, td:first-child { text-align: left }
thead th { border-bottom: 2px solid #888; vertical-align: bottom }
tbody tr:nth-child(even) { background: #f3f5f7 }
.predicted { color: #777 }
img { max-width: 100% }
figure { margin: 1.5rem 0 }
figcaption { color: #555 }
"""


def write_report(path: Path, rows: list[dict], timelines: list[dict], about: dict, pictures: dict) -> None:
    """One HTML file with the pictures inside it; it loads nothing."""
    body = []
    for row in rows:
        m, p = row["measured"], row["predicted"]
        pairs = [(m["seconds"] * 1e3, p["seconds"] * 1e3, ".0f"), (m["collectives"], p["collectives"], "d")]
        pairs.append((m["bytes_sent"] / 1e3, p["bytes_sent"] / 1e3, ",.1f"))
        pairs += [(m[kind] / 1e6, p[kind] / 1e6, ".2f") for kind in MEMORY]
        numbers = [f"{a:{form}} <span class=predicted>({b:{form}})</span>" for a, b, form in pairs]
        body.append([html.escape(row["method"]), str(row["processes"]), *numbers])
    idle = [
        [
            html.escape(timeline["schedule"]),
            str(timeline["micro_batches"]),
            " ".join(f"{share:.1%}" for share in timeline["idle"]),
            f"{timeline['theory']:.1%}",
        ]
        for timeline in timelines
    ]
    figures = []
    for caption, picture in pictures.items():
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f"<img alt='{html.escape(caption)}' src='data:image/png;base64,{data}'>"
        figures.append(f"<figure>{image}<figcaption>{html.escape(caption)}</figcaption></figure>")
    notes = [f"{row['method']}: {note}" for row in rows for note in row["notes"]]
    threads = {name: f"{seconds * 1e3:.1f} ms" for name, seconds in about["data_parallel_forward"].items()}
    notes.append(
        f"DataParallel's threads: two replicas' forward passes take {threads['in_threads']} in threads and "
        f"{threads['one_after_the_other']} one after the other."
    )
    settings = about["settings"]
    columns = [
        "method",
        "processes",
        "ms a step",
        "collectives",
        "KB sent",
        *(f"{kind} MB" for kind in MEMORY),
    ]
    path.write_text(
        f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Parallelism methods, measured</title>
<style>{STYLE}</style><h1>Parallelism methods, measured</h1>
<p>A transformer of {settings["hidden_size"]} hidden units, steps of {settings["global_batch_size"]} samples,
{about["cores"]} cores, torch {about["torch"]}. In brackets what the cost model predicts. Bytes are what a
process sends in a step; memory is the fullest process's. Seconds depend on what else the machine does.</p>
{_table(columns, body)}
{"".join(figures)}
<h2>Idle share of each stage</h2>
{_table(["schedule", "micro-batches", "measured, each stage", "theory"], idle)}
<h2>Notes</h2><ul>{"".join(f"<li>{html.escape(note)}" for note in notes)}</ul></html>
""",
        encoding="utf-8",
    )


def _table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{column}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
