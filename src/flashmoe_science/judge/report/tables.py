"""Verdicts, users' kernels, claims and diagnoses as blocks that a page and the terminal show alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis
from flashmoe_science.judge.diagnose.plan import Outcome, Plan, plan
from flashmoe_science.judge.formats import microseconds, ratio, significant, times, within
from flashmoe_science.judge.gate.claim import ANY, Claim
from flashmoe_science.judge.gate.claims import ClaimResult
from flashmoe_science.judge.report.blocks import Block, Cell, Definitions, Heading, Paragraph, Row, Table, columns
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.stats import MARGIN
from flashmoe_science.judge.summary import SAID, Candidate, Group
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import CorrectnessRow, SeenLaunch

_GROUPS = columns("where", "v:verdicts", "n:geometric mean", "nw:95% interval", "n:least", "n:most", "n:problems")
_VERDICTS = columns(
    "mono:problem", "k:kernel", "v:verdict", "n:ratio", "nw:95% interval", "rival", "n:µs", "n:TFLOP/s", "n:GB/s",
    "nw:error, of what is allowed", "n:pairs",
)  # fmt: skip
_CLAIMS = columns("words:claim", "nw:asks", "n:measured", "nw:95% interval", "n:problems", "v:outcome")
_PLAN = columns("words:change", "key", "clock", "n:part", "n:of it", "n:at most", "n:together")
_OUTCOMES = columns("words:change", "key", "n:at most", "n:all gave", "nw:95% interval")
_MOST_REASONS = 8  # not to give a number; the tables of verdicts have all


def group_table(groups: Sequence[Group]) -> Table:
    """One row for each GPU, suite, clock and cache."""
    rows = []
    titles = titles_of(groups)
    for group in groups:
        counts = ", ".join(f"{group.counts[word]} {word}" for word in SAID if group.counts[word])
        state = next((word for word in SAID if group.counts[word] == len(group.front)), None)
        differs = group.sure != {word: group.counts[word] for word in group.sure}
        cells = [
            Cell(titles[group.anchor], _controls_in_words(group)),
            Cell(counts, group.corrected if differs else None, state),
        ]
        if group.mean is None:
            cells += [Cell()] * 4
        else:
            mean = group.mean
            cells += [Cell(ratio(mean.ratio)), Cell(within(mean.low, mean.high))]
            cells += [Cell(ratio(group.measured[0].ratio)), Cell(ratio(group.measured[-1].ratio))]
        rows.append(Row((*cells, Cell(str(len(group.front))))))
    return Table("groups", "Verdicts by suite", _GROUPS, rows)


def titles_of(groups: Sequence[Group]) -> dict[str, str]:
    """Anchor -> title. Whose kernels they are is left out where it is the same for all groups."""
    of_one = len({group.tried for group in groups}) == 1
    return {one.anchor: one.title.removeprefix(f"{', '.join(one.tried)}: ") if of_one else one.title for one in groups}


def verdict_table(
    label: str, verdicts: Sequence[Verdict], judged: Mapping[str, JudgedRun], fold: str | None = None, page_only: bool = False
) -> Table:
    """One row a verdict, with the error against the oracle, and the launch of a kernel that is no peer."""
    rows = [
        Row(
            (
                Cell(row.problem, row.config or None),
                Cell(row.kernel, None if row.origin == "peer" else _launch_in_words(judged[row.run].launches(row))),
                Cell(row.label, "; ".join(filter(None, (row.reason, *row.remarks))) or None, row.verdict),
                Cell(ratio(row.ratio)),
                Cell(within(row.low, row.high)),
                Cell(row.rival or "", f"{microseconds(row.rival_time_ns)} µs" if row.rival_time_ns else None),
                Cell(microseconds(row.time_ns)),
                Cell(significant(row.tflops)),
                Cell(significant(row.gbps)),
                Cell(_error_in_words(judged[row.run].error(row))),
                Cell(str(row.pairs or "")),
            ),
            row.origin or "",
        )
        for row in verdicts
    ]
    return Table("verdicts", label, _VERDICTS, rows, fold, page_only)


def _error_in_words(row: CorrectnessRow | None) -> str:
    if row is None:
        return ""
    return f"{row.out.nonfinite} NaN or Inf" if row.out.max is None else f"{row.out.max:.2e} of {row.out.bound_max:.2e}"


def _launch_in_words(launches: Sequence[SeenLaunch]) -> str | None:
    """The launch with the most threads, and how many there are beside it."""
    if not launches:
        return None
    one = max(launches, key=lambda seen: math.prod(seen.grid) * math.prod(seen.block))
    words = (
        f"{_count(math.prod(one.grid), 'block')} of {math.prod(one.block)} threads, {one.shared_bytes / 1024:.3g} KiB shared"
    )
    if one.registers is not None:
        words += f", {one.registers} registers"
    return words + (f", and {len(launches) - 1} more" if len(launches) > 1 else "")


def group_verdicts(group: Group, judged: Mapping[str, JudgedRun]) -> Iterator[Table]:
    """The verdict of each problem, then those of every kernel, where there are more."""
    yield verdict_table(f"Verdicts, {group.title}", group.front, judged)
    if len(group.rows) > len(group.front):
        every = f"Every kernel: {_count(len(group.rows), 'verdict')}"
        yield verdict_table(f"Every kernel, {group.title}", group.rows, judged, every, page_only=True)


def candidate_summary(one: Candidate) -> Iterator[Block]:
    """What was found of a user's kernel, what was promised, and why it was refused, where it was."""
    yield Heading(one.name)
    lead, _, found = one.headline.partition(": ")
    yield Paragraph(found, "big", f"{lead}:", one.said)
    if one.promise:
        yield Paragraph(one.promise)
    for reason in one.refusals[1 if one.refused else 0 :][:_MOST_REASONS]:
        yield Paragraph(reason, lead="refused in part:" if not one.refused else "refused:", state="refused")


def claim_table(claims: Sequence[ClaimResult]) -> Table:
    """Each claim beside what was measured, the runs that give its number, and what is wrong or lacking."""
    rows = []
    for one in claims:
        told = [f"{one.why}{' (the records show the contrary)' if one.refuted else ''}"] if one.why else []
        if one.worst_problem:
            told.append(f"worst is {one.worst_problem}")
        if one.runs:
            told.append(f"runs {', '.join(one.runs)}{' (quick: few samples)' if one.quick else ''}")
        cells = (
            Cell(f"{one.claim.id}: {' '.join(one.claim.text.split())}", claim_scope(one.claim)),
            Cell(f"{one.claim.statistic} {one.claim.demand}"),
            Cell(ratio(one.measured)),
            Cell(within(one.low, one.high)),
            Cell(str(one.problems or "")),
            Cell(one.outcome, "; ".join(told), one.outcome.split()[0]),
        )
        rows.append(Row(cells))
    return Table("claims", "Claims", _CLAIMS, rows)


def claim_scope(claim: Claim) -> str:
    """The verdicts that a claim is about, in words."""
    suite = "every suite" if claim.suite == ANY else claim.suite
    sizes = [f"D {claim.head_dim}"] if claim.head_dim else []
    sizes += [f"S from {claim.min_seqlen}"] if claim.min_seqlen else []
    sizes += [f"S to {claim.max_seqlen}"] if claim.max_seqlen else []
    of = (claim.problem, claim.op, claim.dtype, claim.mask, *sizes)
    where = (f"{suite} on {claim.gpu}", f"{claim.clock} clock", f"{claim.cache} cache", *of, _count(claim.problems, "problem"))
    kernel = claim.kernel or "fastest of ours"
    who = f"{kernel} against {claim.rival}" if claim.quantity == "ratio" else f"{claim.quantity} of {kernel}"
    return f"{who}; {', '.join(word for word in where if word)}"


def _controls_in_words(group: Group) -> str | None:
    """How the kernel-against-itself controls of the group's problems came out, and what its samples could have shown."""
    found = {row.problem: (row.control_low, row.control_high) for row in group.rows if row.control_low and row.control_high}
    middles = {problem: (low * high) ** 0.5 for problem, (low, high) in found.items() if low and high}
    if not middles:
        return None
    ties = sum(low > 1 - MARGIN and high < 1 + MARGIN for low, high in found.values() if low and high)
    furthest = max(middles, key=lambda problem: abs(middles[problem] - 1))
    words = f"controls: {ties} of {len(found)} tie, the furthest {middles[furthest]:.4f} on {furthest}"
    could = sorted(row.detectable for row in group.front if row.detectable is not None)
    return words + (f"; detectable: {could[len(could) // 2]:.2%} (median), {could[-1]:.2%} (worst)" if could else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def diagnosis_blocks(one: Diagnosis, gave: Sequence[Outcome]) -> Iterator[Block]:
    """What is known of a kernel, its share of each ceiling, every cause with its evidence, what would change it, and what
    changes that an earlier diagnosis called for gave."""
    facts, launch = one.facts, one.facts.launch
    yield Heading(one.kernel, f"{f'({facts.config}) ' if facts.config else ''}on {one.problem}, {facts.machine}")
    known = [f"{time.time_ns / 1e3:.4g} us on the {clock} clock" for clock, time in facts.times.items()]
    if launch is not None:
        registers = "" if launch.registers is None else f", {launch.registers} registers a thread"
        known.append(f"{facts.blocks} blocks of {facts.threads} threads{registers}, {launch.shared_bytes} B of shared memory")
    yield Paragraph("; ".join(known) or "no time on record")
    yield from (Paragraph(refusal, lead="refused:", state="refused") for refusal in facts.refusals)
    if facts.counters_absent:
        yield Paragraph(f"no counters: {facts.counters_absent}", "dim")
    if one.point is not None and one.point.needs:
        shares = tuple((need.level, f"{need.share:.1%} of {need.ceiling}", "") for need in one.point.needs)
        yield Definitions(shares, f"Shares of ceilings: {len(shares)}")
    for status in ("supported", "untested", "ruled out"):
        causes = [cause for cause in one.hypotheses if cause.status == status]
        if causes:
            items = tuple((cause.title, cause.evidence, status.split()[0]) for cause in causes)
            folded = status != "supported"
            yield Definitions(items, f"{status.capitalize()}: {len(causes)}" if folded else None, page_only=folded)
    yield Paragraph(one.cause, lead="cause:")
    yield from _plan(one, plan(one))
    if gave:
        label = f"What changed since run {gave[0].before_run}, measured in run {gave[0].run} ({gave[0].how})"
        rows = (
            (
                Cell(done.change),
                *map(Cell, (done.hypothesis, times(done.most_gain), times(done.gain), within(done.low, done.high))),
            )
            for done in gave
        )
        yield Table("outcomes", label, _OUTCOMES, [Row(cells) for cells in rows])


def _plan(one: Diagnosis, made: Plan) -> Iterator[Block]:
    """The changes in the order of what each can give at the most, and what they give together."""
    if made.time_ns and made.least_ns:
        least = f"{made.least_ns / 1e3:.4g} us is the least that the binding ceiling lets it take ({made.limit})"
        yield Paragraph(f"{made.time_ns / 1e3:.4g} us; {least}", "dim")
    if not made.steps:
        yield Paragraph("no change is called for by what is on record", "dim")
        return
    rows = []
    for step in made.steps:
        faster = "removed" if math.isinf(step.speedup) else f"{step.speedup:.3g}x"
        together = f"{times(step.cumulated)}{' (the ceiling)' if step.capped else ''}"
        cells = (step.hypothesis, step.clock, f"{step.part:.0%}", faster, times(step.most_gain), together)
        rows.append(Row((Cell(step.change, step.how), *map(Cell, cells))))
    yield Table("plans", f"Plan for {one.kernel} on {one.problem}", _PLAN, rows)
