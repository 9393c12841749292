"""The report as text: Markdown to paste, CSV to load, JSON lines for a program."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
from collections.abc import Iterable, Sequence

from flashmoe_science.judge.contents import Contents
from flashmoe_science.judge.formats import (
    markdown_cell,
    microseconds,
    ratio,
    sheet_cell,
    significant,
    times,
    with_interval,
    within,
)
from flashmoe_science.judge.gate.claim import ANY, Claim
from flashmoe_science.judge.gate.claims import ClaimResult
from flashmoe_science.judge.summary import SAID, Group
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.judge.views import Refused, RunFacts


def as_markdown(contents: Contents) -> str:
    """Kernels on trial, the summary, the claims, the verdicts problem by problem, what was refused and why, and the runs."""
    parts = ["# What the records say", ""]
    for one in contents.candidates:
        told = " ".join(filter(None, (f"{one.headline}.", one.wait, one.promise)))
        parts += [f"**{_inline(one.name)}**: {_inline(told)}", ""]
    parts += [*_summary(contents.groups), ""]
    if contents.claims:
        parts += ["## Claims", "", *_head("claim", "where", "asks", ">measured", "95% interval", "outcome")]
        parts += [_row(_claim(result)) for result in contents.claims] + [""]
    for group in contents.groups:
        headings = ("problem", "kernel", ">us", ">TFLOP/s", "rival", ">ratio", "95% interval", "verdict")
        parts += [f"## {_inline(group.title)}", "", *_head(*headings), *(_row(_verdict(row)) for row in group.front), ""]
    if contents.diagnoses:
        parts += ["## Diagnosis", ""]
        parts += [f"- {_inline(one.kernel)} on {one.problem}: {_inline(one.cause)}" for one in contents.diagnoses] + [""]
    if contents.refusals:
        parts += ["## Refusals", "", *_head("kernel", "reason", "stage", "where")]
        parts += [_row(_refused(one)) for one in contents.refusals] + [""]
    parts += ["## Runs", "", *(_run(facts) for facts in contents.runs)]
    return "\n".join(parts) + "\n"


def as_csv(judged: Sequence[Verdict]) -> str:
    """Every verdict, every field."""
    names = [field.name for field in dataclasses.fields(Verdict) if field.name != "interval"]
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: sheet_cell(value) for name, value in row.as_dict().items()} for row in judged)
    return text.getvalue()


def as_jsonl(contents: Contents) -> str:
    """One JSON object a line, its ``kind`` first: verdict, claim, refusal, diagnosis, plan, prediction, agreement, cost."""
    lines: list[dict[str, object]] = [{"kind": "verdict", **row.as_dict()} for row in contents.judged]
    for result in contents.claims:
        plain = {field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "claim"}
        lines.append({"kind": "claim", **result.claim.model_dump(), **plain})
    lines += [{"kind": "refusal", **dataclasses.asdict(refused)} for refused in contents.refusals]
    lines += [{"kind": "diagnosis", **one.as_dict()} for one in contents.diagnoses]
    lines += [{"kind": "plan", **one.as_dict()} for one in contents.plans]
    lines += [{"kind": "prediction", **one.as_dict()} for one in contents.outcomes]
    lines += [{"kind": "agreement", **one.as_dict()} for one in contents.agreements]
    lines += [{"kind": "cost", **dataclasses.asdict(one), "usd": one.usd} for one in contents.cost.runs]
    return "".join(json.dumps(line) + "\n" for line in lines)


def claim_scope(claim: Claim) -> str:
    """Which verdicts a claim is about, in words."""
    suite = "every suite" if claim.suite == ANY else claim.suite
    sizes = [f"D {claim.head_dim}"] if claim.head_dim else []
    sizes += [f"S from {claim.min_seqlen}"] if claim.min_seqlen else []
    sizes += [f"S to {claim.max_seqlen}"] if claim.max_seqlen else []
    of = (claim.problem, claim.op, claim.dtype, claim.mask, *sizes, claim.kernel)
    scope = ", ".join(word for word in (f"{suite} on {claim.gpu}", f"{claim.clock} clock", *of) if word)
    return f"{scope}, against {claim.rival}" if claim.quantity == "ratio" else scope


def _summary(found: Sequence[Group]) -> list[str]:
    if not found:
        return ["No records."]
    lines = [*_head("", ">problems", "ratio, geometric mean", ">least", ">most", *(f">{word}" for word in SAID))]
    for group in found:
        ratios: tuple[str, ...] = ("", "", "")
        if group.mean is not None and group.least is not None and group.most is not None:
            mean = with_interval(group.mean.ratio, group.mean.low, group.mean.high)
            ratios = (mean, ratio(group.least.ratio), ratio(group.most.ratio))
        lines.append(_row((group.title, str(len(group.front)), *ratios, *(str(group.counts[word]) for word in SAID))))
    return lines


def _claim(result: ClaimResult) -> tuple[str, ...]:
    asked = (result.claim.text, claim_scope(result.claim), f"{result.claim.statistic} {result.claim.demand}")
    interval = within(result.low, result.high)
    told = result.outcome if result.why is None else f"{result.outcome}: {result.why}"
    return (*asked, ratio(result.measured), interval, told)


def _verdict(row: Verdict) -> tuple[str, ...]:
    interval = within(row.low, row.high)
    told = row.verdict if row.reason is None else f"{row.verdict}: {row.reason}"
    speed = (microseconds(row.time_ns), significant(row.tflops))
    return (row.problem, row.kernel, *speed, row.rival or "", times(row.ratio), interval, told)


def _refused(one: Refused) -> tuple[str, ...]:
    more = f" and {len(one.problems) - 1} more" if len(one.problems) > 1 else ""
    return (one.kernel or "the whole problem", one.reason, one.stage, f"{one.problems[0]}{more}, {one.gpu}")


def _run(facts: RunFacts) -> str:
    header = facts.run.header
    where = _inline(f"{header.suite} on {header.environment.gpu or header.environment.cpu}")
    command = facts.command.replace("`", "'")
    return f"- {_inline(header.run)}: {where}, {header.started}, commit {_inline(header.commit or 'unknown')}: `{command}`"


def _head(*headings: str) -> tuple[str, str]:
    """A table's two first lines; a heading that begins with ">" is of a column of numbers."""
    return _row(heading.removeprefix(">") for heading in headings), "|" + "|".join(
        "---:" if heading.startswith(">") else "---" for heading in headings
    ) + "|"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(markdown_cell, cells))} |"


def _inline(text: str) -> str:
    return markdown_cell(text).replace("*", "\\*").replace("_", "\\_")
