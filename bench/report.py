"""The plots and tables of docs/evidence/benchmarks.md: `python -m bench.report FILE`, with the file that
`dev.py bench --json` wrote.

The plots have a light background of their own, so that they can be read on a dark page, too.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl

from bench.contenders import BARE, OURS
from bench.measure import Table, as_text, median

mpl.use("Agg")
mpl.rcParams.update(
    {
        "svg.hashsalt": "django_mongolock",
        "svg.fonttype": "none",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "figure.facecolor": "white",
        "savefig.facecolor": "white",
    }
)
from matplotlib import pyplot as plt  # noqa: E402 - after it was told how

OURS_COLOR: Final = "#0b6e4f"
BARE_COLOR: Final = "#222222"
OTHER_COLOR: Final = "#9aa5b1"

Questions = dict[str, Any]
#: The beginning of the page with the tables.
HEAD: Final = """# Benchmark data

These are the figures of the [benchmarks](../benchmarks.md), from one run of `python3 dev.py bench`. A figure is the
median of the rounds, with the lowest and the highest in brackets.

## Machine and versions

"""


def write(answers: dict[str, Any], page: Path) -> None:
    """Write all tables, as Markdown."""
    facts = [f"- {name}: {listed(fact)}" for name, fact in answers["machine"].items()]
    lines = [HEAD + "\n".join(facts)]
    for name, found in answers["questions"].items():
        lines.append(f"## {name}: {found['title'].removesuffix('.')}")
        lines += [as_text(Table(**table)).strip() for table in found["tables"]]
        lines += ["\n".join(f"- {note}" for note in found["notes"])] if found["notes"] else []
    page.write_text("\n\n".join(lines) + "\n")


def listed(fact: Any) -> str:
    return ", ".join(f"{name} {value}" for name, value in fact.items()) if isinstance(fact, dict) else str(fact)


def draw(questions: Questions, folder: Path) -> None:
    """Draw the plots with figures."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (needs, make) in PLOTS.items():
        if data := questions.get(needs, {}).get("data"):
            figure, axes = plt.subplots(figsize=(7.2, 4.0))
            try:
                make(axes, data)
                figure.tight_layout()
                figure.savefig(folder / f"benchmark-{name}.svg", metadata={"Date": None})
            except (KeyError, ValueError) as error:  # a question that ended early has no such figures
                print(f"plot {name}: left out: {type(error).__name__}: {error}")
            finally:
                plt.close(figure)


def color(name: str) -> str:
    return OURS_COLOR if name.startswith(OURS.name) else BARE_COLOR if name == BARE.name else OTHER_COLOR


def bars(axes: Any, figures: dict[str, float], label: str, *, log: bool = True) -> None:
    """Draw horizontal bars, the shortest on top, each with its figure."""
    names = sorted(figures, key=lambda name: figures[name], reverse=True)
    values = [figures[name] for name in names]
    axes.barh(names, values, color=[color(name) for name in names])
    if log:
        axes.set_xscale("log")
        axes.set_xlim(min(values) / 2, max(values) * 4)
    for row, value in enumerate(values):
        axes.text(value, row, f" {value:.3g}", va="center")
    axes.set_xlabel(label)


def alone(axes: Any, data: dict[str, Any]) -> None:
    figures = {name: median(times) for name, times in data["one node"].items()}
    bars(axes, figures, "ms for acquire and release of a free lock, one node (log scale)")


def lines(axes: Any, sizes: dict[str, Any], field: str, label: str) -> None:
    """Draw a line for each lock over the number of processes."""
    names = {name: None for found in sizes.values() for name in found}
    styles = ["-", "--", "-.", ":"]
    for number, name in enumerate(names):
        points = [(int(n), median(found[name][field])) for n, found in sizes.items() if name in found]
        if len(points) == 1 < len(sizes):
            continue  # it is in the tables
        mine = name == OURS.name
        style = {"color": OURS_COLOR, "linewidth": 2.8, "zorder": 9} if mine else {"linestyle": styles[number % 4]}
        axes.plot([x for x, _ in points], [y for _, y in points], marker="o", markersize=4, label=name, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [int(n) for n in sizes]
    axes.set_xticks(ticks, [str(n) for n in ticks])
    axes.set_xlabel("processes that want the same key")
    axes.set_ylabel(label)
    axes.legend(fontsize=6.5, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def hand_over(axes: Any, data: dict[str, Any]) -> None:
    lines(axes, data["sizes"], "hand_over", "hand-over, ms (log scale)")


def fairness(axes: Any, data: dict[str, Any]) -> None:
    found = data["sizes"]["8"]
    uneven = {
        name: median([long / mean for long, mean in zip(runs["longest_wait"], runs["mean_wait"], strict=True) if mean])
        for name, runs in found.items()
    }
    bars(axes, uneven, "longest wait / mean wait, 8 processes (log scale)")


#: The question and the drawing function of each plot, by file name.
PLOTS: Final[dict[str, tuple[str, Callable[[Any, dict[str, Any]], None]]]] = {
    "alone": ("alone", alone),
    "hand-over": ("contended", hand_over),
    "fairness": ("contended", fairness),
}

if __name__ == "__main__":
    found = json.loads(Path(sys.argv[1]).read_text())
    draw(found["questions"], Path("docs/images"))
    write(found, Path("docs/evidence/data/benchmarks.md"))
