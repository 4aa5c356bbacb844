"""Draw the pictures of the explanation: `python docs/images/draw.py`. A test compares them with the files.

Each has a background of its own, so that it can be read on light and on dark pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
INK, SOFT, LINE, PAPER = "#1f2933", "#52606d", "#9aa5b1", "#f7f9fb"
BLUE, GREEN, AMBER, RED = "#cfe3fa", "#cdeccd", "#fbe3b5", "#f7caca"
EDGE = {BLUE: "#2f6fb3", GREEN: "#2e7d32", AMBER: "#b7791f", RED: "#b83232"}


def text(
    x: float, y: float, words: str, *, size: int = 14, fill: str = INK, anchor: str = "start", bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    where = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
    return f'<text {where} font-size="{size}" fill="{fill}"{weight}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, words: str = "", *, size: int = 14) -> str:
    where = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    frame = f'<rect {where} rx="5" fill="{fill}" stroke="{EDGE.get(fill, LINE)}"/>'
    return frame + (text(x + width / 2, y + height / 2 + 5, words, size=size, anchor="middle") if words else "")


def line(
    x1: float, y1: float, x2: float, y2: float, *, color: str = SOFT, arrow: bool = False, dashed: bool = False
) -> str:
    end = ' marker-end="url(#arrow)"' if arrow else ""
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{color}" stroke-width="1.5"{end}{dash}/>'


def picture(width: int, height: int, title: str, parts: Iterable[str]) -> str:
    body = "\n".join(parts)
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" \
font-family="system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif">
<title>{escape(title)}</title>
<defs><marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M0 0L10 5L0 10z" fill="{SOFT}"/></marker></defs>
<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="{LINE}"/>
{body}
</svg>
"""


def lease() -> str:
    """What at the holder, and what the server gives, when a holder is killed."""

    def at(second: float) -> float:
        return 172 + second * 10.6

    parts = [text(20, 32, "A lease of 30 seconds, renewed every 10, and a holder that is killed", size=16, bold=True)]
    rows = [("at the holder", 62), ("at the server", 122), ("the next waiter", 182)]
    parts += [text(20, y + 24, name, fill=SOFT) for name, y in rows]
    parts += [
        box(at(0.6), 62, at(40) - at(0.6), 36, BLUE),
        text(at(14) + 8, 85, "for 30 s from before each command"),
        box(at(0.3), 122, at(43.2) - at(0.3), 36, GREEN),
        text(at(14) + 8, 145, "for 33 s (lease and margin) from each"),
        box(at(15), 182, at(43.2) - at(15), 36, AMBER, "waits, first in the queue"),
        box(at(43.2), 182, at(54) - at(43.2), 36, BLUE, "held"),
    ]
    parts += [line(at(second), 236, at(second), 242) for second in (0, 10, 20, 30, 40, 50)]
    parts += [text(at(second), 258, f"{second} s", size=12, fill=SOFT, anchor="middle") for second in (0, 20, 30, 50)]
    parts += [line(at(0), 236, at(54), 236)]
    for second, words in [(0, "acquires"), (10, "renews")]:
        parts += [
            line(at(second), 52, at(second) + 3, 122, arrow=True),
            text(at(second) - 4, 50, words, size=12, fill=SOFT),
        ]
    parts += [
        line(at(14), 54, at(14), 106, color=EDGE[RED]),
        text(at(14) + 6, 50, "killed", size=12, fill=EDGE[RED]),
        line(at(40), 100, at(40), 236, color=EDGE[BLUE], dashed=True),
        line(at(43.2), 100, at(43.2), 236, color=EDGE[GREEN], dashed=True),
        text(at(40), 285, "40 s: a holder that was paused", size=12, fill=EDGE[BLUE], anchor="end"),
        text(at(40), 302, "knows that its lease has ended", size=12, fill=EDGE[BLUE], anchor="end"),
        text(at(43.2), 285, "43 s: the next waiter", size=12, fill=EDGE[GREEN]),
        text(at(43.2), 302, "is granted the lock", size=12, fill=EDGE[GREEN]),
    ]
    return picture(770, 320, "The holder stops using the lock before the server grants it to the next waiter", parts)


def rule() -> str:
    """The document of a key, and the one update."""
    parts = [text(20, 32, "One key, one document, one update", size=16, bold=True)]
    parts += [box(20, 50, 310, 250, "#ffffff"), text(36, 76, '_id: "order:5"', bold=True)]
    parts += [text(36, 104, "holders", fill=SOFT), box(120, 88, 190, 26, BLUE, "web-1, token 41, until …", size=12)]
    parts += [text(36, 142, "waiters", fill=SOFT)]
    parts += [
        box(120, 126 + 30 * row, 190, 26, AMBER, name, size=12)
        for row, name in enumerate(["web-2", "celery-1", "web-3"])
    ]
    parts += [text(36, 240, "token", fill=SOFT), text(120, 240, "41, only ever larger")]
    parts += [text(36, 264, "clock", fill=SOFT), text(120, 264, "the election of its times", size=13)]
    parts += [text(36, 287, "…", fill=SOFT), text(120, 287, "statistics", fill=SOFT, size=13)]
    steps = [
        ("1  prune", "what has expired, by the primary's clock"),
        ("2  remove, renew, add", "releases, renewals, new waiters"),
        ("3  grant", "from the head of the queue: as many as fit"),
    ]
    for row, (name, words) in enumerate(steps):
        y = 62 + row * 78
        parts += [
            box(430, y, 300, 56, GREEN),
            text(446, y + 23, name, bold=True),
            text(446, y + 43, words, size=12, fill=SOFT),
        ]
        if row:
            parts.append(line(580, y - 22, 580, y - 3, arrow=True))
    parts += [line(332, 90, 426, 90, arrow=True), line(426, 246, 334, 246, arrow=True)]
    parts += [
        text(380, 80, "read", size=12, fill=SOFT, anchor="middle"),
        text(380, 236, "written", size=12, fill=SOFT, anchor="middle"),
    ]
    return picture(750, 320, "A lock document and the three steps of the update that changes it", parts)


def queue() -> str:
    """A hand-over between hosts."""
    parts = [text(20, 32, "First come, first served: a hand-over", size=16, bold=True)]
    columns = [("web-1, holds", 100), ("MongoDB's primary", 330), ("web-2, waits", 540), ("celery-1, waits", 680)]
    parts += [text(x, 66, name, anchor="middle", bold=True) for name, x in columns]
    parts += [line(x, 78, x, 300, color=LINE) for _, x in columns]
    for y, start, end, words, place in [
        (104, 540, 330, "acquire: second in the queue", 435),
        (140, 680, 330, "acquire: third", 435),
        (186, 100, 330, "release", 215),
    ]:
        parts += [
            line(start, y, end + (4 if start > end else -4), y, arrow=True),
            text(place, y - 6, words, size=12, fill=SOFT, anchor="middle"),
        ]
    parts += [
        box(245, 200, 170, 30, GREEN, "removes 1, grants 2", size=13),
        line(415, 215, 536, 250, arrow=True),
        text(532, 194, "bell: granted", size=12, fill=SOFT, anchor="end"),
        box(490, 254, 100, 30, BLUE, "holds", size=13),
        box(632, 254, 96, 30, AMBER, "is next", size=13),
    ]
    return picture(770, 320, "A release grants the lock to the first waiter in the same update", parts)


def clocks() -> str:
    """A failover to a clock that is ahead."""

    def at(second: float) -> float:
        return 180 + second * 13

    def lane(y: float, name: str, until: float, fill: str) -> list[str]:
        return [text(20, y + 22, name, fill=SOFT), box(at(0), y, at(until) - at(0), 34, fill)]

    parts = [text(20, 32, "A failover to a member whose clock is 25 seconds ahead", size=16, bold=True)]
    parts += [line(at(10), 72, at(10), 286, color=EDGE[RED], dashed=True)]
    parts += [text(at(10), 302, "the old primary dies", size=12, fill=EDGE[RED], anchor="middle")]
    parts += [text(20, 64, "if the new primary judged times of the old one:", bold=True)]
    parts += [
        *lane(76, "first holder", 30, BLUE),
        text(at(0) + 10, 98, "continues to use the lock"),
    ]
    parts += [
        text(20, 136, "second holder", fill=SOFT),
        box(at(10), 114, at(40) - at(10), 34, RED, "granted at once: two holders"),
    ]
    parts += [text(20, 190, "with this library:", bold=True)]
    parts += [
        *lane(202, "first holder", 10, BLUE),
        box(at(10), 202, at(40) - at(10), 34, BLUE, "one whole lease from here, by the new clock"),
    ]
    parts += [text(20, 262, "second holder", fill=SOFT), box(at(10), 240, at(40) - at(10), 34, AMBER, "waits")]
    return picture(
        720, 320, "Why a lease that was written under one primary is not judged by the clock of the next", parts
    )


PICTURES = {"lease.svg": lease, "rule.svg": rule, "queue.svg": queue, "clocks.svg": clocks}


def main() -> None:
    for name, draw in PICTURES.items():
        (FOLDER / name).write_text(draw())


if __name__ == "__main__":
    main()
