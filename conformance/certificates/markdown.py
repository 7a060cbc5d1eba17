"""Markdown of text that others wrote: shown as it is, and never obeyed.

What a subject says, its failures and its names come into a job's summary. A code span or a fenced block is literal wherever
Markdown is rendered: no HTML, links, images, mentions or references come out of it, provided that its fence is longer than any in
the text. So everything that is not a constant of the kit's goes through one of these two.
"""

import re

LINES, LENGTH = 40, 4000  # what is left of a block; the report has all of it
_TICKS = re.compile(r"`+")


def span(text: object) -> str:
    """Return a code span: one line, which can stand in a table."""
    line = " ".join(printable(str(text)).split())
    if not line:
        return ""
    ticks = "`" * (_longest(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}".replace("|", "\\|")


def block(text: str) -> str:
    """Return a fenced code block, cut to what a summary can hold."""
    lines = printable(text).splitlines()
    kept = "\n".join(lines[:LINES])[:LENGTH]
    cut = "\n[...]" if len(kept) < len("\n".join(lines)) else ""
    fence = "`" * max(3, _longest(kept) + 1)
    return f"{fence}text\n{kept}{cut}\n{fence}"


def printable(text: str) -> str:
    """Return a text without what steers a terminal, or the direction that it is read in; lines and tabs stay."""
    return "".join(
        char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode()
        for char in text
    )


def _longest(text: str) -> int:
    return max((len(run) for run in _TICKS.findall(text)), default=0)
