"""Figures of speed in a Markdown text: what is written, in which unit, how exactly, and where.

A figure is a number with a unit of speed: a time, a rate, a ratio (1.7x, twice as fast, a speed-up of 2), a percentage of more
or less speed or of a peak, tokens a second; a range has two. In a table the unit may stand in the heading of the column or of
the row. Emphasis, HTML, spaces that do not break and digits of other scripts do not hide one, and neither does code: a pasted
output says as much as a sentence. A number without such a unit is not a figure; nor is one in an HTML comment.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Unit = Literal["ratio", "percent", "share", "peak", "ns", "tflops", "gbps", "queries"]

_START = r"(?<![\w.,])"
_DIGITS = r"(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:e[+-]?\d{1,4})?"
_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "twelve": 12,
    "fifteen": 15, "twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "a hundred": 100, "hundred": 100, "one hundred": 100,
}  # fmt: skip
_FACTORS = {
    "twice": 2, "thrice": 3, "doubl": 2, "tripl": 3, "trebl": 3, "quadrupl": 4, "halv": 2, "half": 2,
    "an order of magnitude": 10, "two orders of magnitude": 100,
}  # fmt: skip
_SPEED = r"(?:speed|throughput|performance|bandwidth)"
_TIME = r"(?:time|latency|run-?time|duration)"
_MORE = (
    rf"(?:faster|slower|quicker|as fast|as slow|as quick(?:ly)?|speed-?ups?|acceleration|the {_SPEED}|the {_TIME}"
    rf"|(?:higher|better|more|greater|lower|worse|less) (?:{_SPEED}|{_TIME})|shorter|longer"
    rf"|(?:improvement|gain|increase|reduction|drop|decrease) in {_SPEED[:-1]}|{_TIME[3:]})"
)
_PER_CENT = r"(?:%|percent\b|per cent\b)"
_ABOUT = r"(?:about|around|roughly|nearly|almost|over|up to|more than|at least|some|[~\u2248<>\u2264\u2265=]+)?\s*"
_SMALL = {"m": 1e6, "u": 1e3, "µ": 1e3, "μ": 1e3, "n": 1.0, "mil": 1e6, "mic": 1e3, "nan": 1.0}
_TIMES = r"(?:milli|micro|nano)(?:second)?s?|[mnuµμ]s(?:ecs?)?"
_SECONDS = r"(?:s|secs?|seconds?)(?=\s*(?:/|a|per|each)\s*(?:call|iteration|forward|backward|step|token|layer|kernel|launch)\b)"
_RATES = (
    r"[PTGM]FLOPS?(?:/s|ps)?|(?:peta|tera|giga)flops?(?: (?:per|a) second)?|[PT]OPS?(?:/s)?\b|[TGM]i?B(?:/s|ps)\b"
    r"|(?:tera|giga|mega)bytes? (?:per|a) second"
)
_FLOPS = {"p": 1e3, "t": 1.0, "g": 1e-3, "m": 1e-6}
_BYTES = {"t": 1e3, "g": 1.0, "m": 1e-3}
_BINARY = {"t": 1.024**4 * 1e3, "g": 1.024**3, "m": 1.024**2 * 1e-3}
_MANY = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e3}

# Each has the number first, then what it is a number of.
_AFTER = re.compile(
    rf"{_START}(?P<number>{_DIGITS})(?:"
    rf"\s?(?P<time>{_TIMES})\b|\s?(?P<seconds>{_SECONDS})"
    rf"|\s?(?P<rate>{_RATES})"
    rf"|(?P<ratio>[x\u00d7](?!\w|\s*\d)|\s[x\u00d7](?=\s*(?:$|[|)\];,.!?]|{_MORE}|than\b|over\b|against\b|vs\b))"
    rf"|[\s-]?times\s+{_MORE}|\s?-?fold\b)"
    rf"|\s?{_PER_CENT}\s+(?P<percent>{_MORE})"
    rf"|\s?{_PER_CENT}\s+of\s+(?P<share>(?:the|its|their|our)\s+(?:{_SPEED}|{_TIME}))"
    rf"|\s?{_PER_CENT}\s+(?P<peak>of\s+(?:[\w-]+\s+){{0,4}}?(?:peak|roofline|roof|ceiling|bandwidth|speed of light)\b"
    r"|(?:[\w-]+\s+){0,2}?utili[sz]ation\b)"
    r"|\s?(?P<many>[kMGBT]|thousand|million|billion)?\s?(?P<queries>(?:tok(?:en)?s?|quer(?:y|ies))\s?(?:/|per|a)\s?s(?:ec(?:ond)?)?\b)"
    r")",
    re.IGNORECASE | re.MULTILINE,
)
_BEFORE = re.compile(
    r"(?:(?:(?:speed-?ups?|acceleration)(?:\s+(?:of|is|was)|\s*[:=])"
    r"|(?:faster|slower|quicker|speeds?(?: it| them)? up)\s+by(?: a factor of)?)\s*"
    rf"|(?:cut|cuts|reduces?d?|lowers?|shortens?)\s+(?:the\s+|its\s+)?{_TIME}\s+(?:\w+\s+){{0,3}}?by\s+)"
    rf"{_ABOUT}(?P<number>{_DIGITS})(?P<percent>\s?{_PER_CENT})?"
    rf"|{_START}[x\u00d7]\s?(?P<times>\d+\.\d+)\b",
    re.IGNORECASE,
)
_IN_WORDS = re.compile(
    rf"\b(?:(?P<word>{'|'.join(sorted(_WORDS, key=len, reverse=True))})[\s-]?(?:times\s+{_MORE}|fold\b)"
    rf"|(?P<factor>twice|thrice|half|an order of magnitude|two orders of magnitude)\s+{_MORE}"
    rf"|(?P<verb>doubl|tripl|trebl|quadrupl|halv)(?:es?|ed|ing)\s+(?:the\s+|its\s+|our\s+|their\s+)?(?:{_SPEED}|{_TIME}))",
    re.IGNORECASE,
)
_RANGE = re.compile(
    rf"(?:{_START}(?P<number>{_DIGITS})\s*(?:-|\u2013|\u2014|to)|\bbetween\s+(?P<between>{_DIGITS})\s+and)\s*$", re.IGNORECASE
)
_HEADING = re.compile(
    rf"(?:^|[\s(\[,])(?:(?P<time>{_TIMES})(?=$|[\s)\],])|(?P<rate>{_RATES})(?=$|[\s)\],])"
    r"|(?P<ratio>speed-?ups?\b|ratio\b|times faster\b))",
    re.IGNORECASE,
)
_CELL = re.compile(rf"[\s~\u2248<>]*(?P<number>{_DIGITS})(?=$|[\s\[(\u00b1x\u00d7])", re.IGNORECASE)
_RULE = re.compile(r"\s*\|?\s*:?-+:?\s*(?:\|\s*:?-*:?\s*)*")
_TAG = re.compile(r"</?(?:b|i|u|em|strong|code|tt|kbd|span|font|sup|sub|small|big|mark|p|center|td|th|tr|br)\b[^<>]*>", re.I)
_ENTITY = {"&times;": "\u00d7", "&#215;": "\u00d7", "&nbsp;": " ", "&thinsp;": " ", "&#160;": " ", "&micro;": "µ"}


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure as it is written: ``value`` in ``unit`` (ns, 1e12 FLOP/s, 1e9 B/s, queries/s), rounded by at most ``half``."""

    line: int
    text: str
    unit: Unit
    value: float
    half: float


def figures_in(text: str, first_line: int = 1) -> list[Figure]:
    """Every figure of speed, in order."""
    readable = _readable(text)
    found: dict[int, Figure] = {}  # by the place of its number, so that no two patterns find the same
    for place, unit, written, scale, words in (*_sentences(readable), *_tables(readable)):
        digits = written.replace(",", "").lower()
        mantissa, _, exponent = digits.partition("e")
        half = float(f"5e{int(exponent or 0) - len(mantissa.partition('.')[2]) - 1}")
        if unit not in _PARTS:  # 2x is no way to write 1.6x, though it rounds to it
            half = min(half, _ROUNDING * float(digits))
        line = first_line + readable.count("\n", 0, place)
        found.setdefault(place, Figure(line, " ".join(words.split()), unit, float(digits) * scale, half * scale))
    return [found[place] for place in sorted(found)]


_PARTS: tuple[Unit, ...] = ("percent", "share", "peak")
_ROUNDING = 0.05
_Found = tuple[int, Unit, str, float, str]  # place of the number, unit, digits, scale, words


def _sentences(text: str) -> Iterator[_Found]:
    for match in _AFTER.finditer(text):
        unit, scale = _unit(match)
        yield match.start("number"), unit, match["number"], scale, match[0]
        before = _RANGE.search(text, max(0, match.start() - 40), match.start())
        if before:
            name = "number" if before["number"] else "between"
            yield before.start(name), unit, before[name], scale, before[0] + match[0]
    for match in _BEFORE.finditer(text):
        name = "number" if match["number"] else "times"
        yield match.start(name), "percent" if match["percent"] else "ratio", match[name], 1.0, match[0]
    for match in _IN_WORDS.finditer(text):
        word = (match["word"] or match["factor"] or match["verb"]).lower()
        yield match.start(), "ratio", str((_WORDS | _FACTORS)[" ".join(word.split())]), 1.0, match[0]


def _tables(text: str) -> Iterator[_Found]:
    """Numbers whose unit stands in the heading of their column, or at the beginning of their row."""
    place, headings, before = 0, list[tuple[Unit, float] | None](), ""
    for line in text.splitlines(keepends=True):
        if "|" not in line:
            headings, before = [], ""
        elif _RULE.fullmatch(line.rstrip()):
            headings = [_heading(cell) for _, cell in _cells(before)]
        else:
            cells = list(_cells(line))
            own = _heading(cells[0][1]) if cells and headings else None
            for (at, cell), heading in zip(cells, headings, strict=False):
                number, of = _CELL.match(cell), heading or own
                if number and of:
                    yield place + at + number.start("number"), of[0], number["number"], of[1], number[0]
            before = line
        place += len(line)


def _cells(line: str) -> Iterator[tuple[int, str]]:
    """(place in the line, text) of each cell."""
    at = len(line) - len(line.lstrip().removeprefix("|"))
    for cell in line[at:].rstrip().removesuffix("|").split("|"):
        yield at, cell
        at += len(cell) + 1


def _heading(cell: str) -> tuple[Unit, float] | None:
    match = _HEADING.search(cell)
    return _unit(match) if match else None


def _unit(match: re.Match[str]) -> tuple[Unit, float]:
    found = {name: part for name, part in match.groupdict().items() if part}
    if "time" in found:
        written = found["time"].lower()
        return "ns", _SMALL[written[:3] if written[:3] in _SMALL else written[0]]
    if "seconds" in found:
        return "ns", 1e9
    if "rate" in found:
        return _rate(found["rate"].lower())
    if "queries" in found:
        return "queries", _MANY[found.get("many", "").lower()[:1]]
    return next((unit for unit in _PARTS if unit in found), "ratio"), 1.0


def _rate(written: str) -> tuple[Unit, float]:
    if "flop" in written or "op" in written:
        return "tflops", _FLOPS[written[0]]
    return "gbps", _BINARY[written[0]] if written[1] == "i" and not written.startswith("gig") else _BYTES[written[0]]


def _readable(text: str) -> str:
    """The same lines without what hides a number from a pattern and not from a reader."""
    text = _without_comments(unicodedata.normalize("NFKC", text))
    for written, meant in _ENTITY.items():
        text = text.replace(written, meant)
    text = re.sub(r"\$?\\times\$?", "\u00d7", _TAG.sub("", text))
    text = re.sub("[\u200b-\u200d\u2060\ufeff\u00ad]|[*`]|__|~~", "", text)
    return re.sub(r"[^\S\n]", " ", text)


def _without_comments(text: str) -> str:
    """By hand, for a pattern would look for the end of every comment that has none."""
    kept, at = [], 0
    while (start := text.find("<!--", at)) >= 0 and (end := text.find("-->", start)) >= 0:
        kept += [text[at:start], "\n" * text.count("\n", start, end)]
        at = end + len("-->")
    return "".join([*kept, text[at:]])


def blank(match: re.Match[str]) -> str:
    """As many lines, of nothing, so that what follows keeps its line."""
    return "\n" * match[0].count("\n")
