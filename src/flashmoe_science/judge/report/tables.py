"""Verdicts, users' kernels, claims and diagnoses as blocks that a page and the terminal show alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from flashmoe_science.judge.diagnose.diagnosis import Diagnosis, Gained
from flashmoe_science.judge.formats import count, microseconds, ratio, significant, times, within
from flashmoe_science.judge.gate.claims import ANY, Claim, ClaimResult
from flashmoe_science.judge.grouped import grouped
from flashmoe_science.judge.report.blocks import (
    Bar,
    Bars,
    Block,
    Cell,
    Definitions,
    Fold,
    Heading,
    Paragraph,
    Row,
    Table,
    columns,
)
from flashmoe_science.judge.standing import JudgedRun
from flashmoe_science.judge.stats import MARGIN, call
from flashmoe_science.judge.summary import JUDGEMENTS, Candidate, Group, counts_in_words
from flashmoe_science.judge.verdicts import Verdict
from flashmoe_science.records import CorrectnessRow, SeenLaunch

_GROUPS = columns("where", "v:verdicts", "n:geometric mean", "nw:95% interval", "n:least", "n:most", "n:problems")
_VERDICTS = columns("mono:problem", "k:kernel", "n:us", "n:TFLOP/s", "k:rival", "n:ratio", "nw:95% interval", "v:verdict")
_DETAILS = columns("n:GB/s", "nw:error, of what is allowed", "n:pairs")
_CLAIMS = columns("words:claim", "nw:asks", "n:measured", "nw:95% interval", "n:problems", "v:outcome")
_PLAN = columns("words:change", "key", "clock", "n:part", "n:of it", "n:at most", "n:together")
_MOST_REASONS = 8  # for refusals, that are shown; the tables of verdicts have all


def group_table(groups: Sequence[Group]) -> Table:
    """A table with a row for each group."""
    rows = []
    titles = titles_of(groups)
    for group in groups:
        state = next((word for word in JUDGEMENTS if group.counts[word] == len(group.front)), None)
        differs = group.sure != {word: group.counts[word] for word in group.sure}
        figures = [""] * 4
        if (mean := group.mean) is not None:
            extremes = (ratio(group.measured[place].ratio) for place in (0, -1))
            figures = [ratio(mean.ratio), within(mean.low, mean.high), *extremes]
        where = Cell(titles[group.anchor], _controls_in_words(group))
        cell = Cell(counts_in_words(group.counts), group.corrected if differs else None, state)
        rows.append(Row((where, cell, *map(Cell, (*figures, str(len(group.front)))))))
    return Table("groups", "Verdicts by suite", _GROUPS, rows)


def titles_of(groups: Sequence[Group]) -> dict[str, str]:
    """Anchor -> title. The users' kernels are left out of it where they are the same for all groups."""
    of_one = len({group.tried for group in groups}) == 1
    return {one.anchor: one.title.removeprefix(f"{', '.join(one.tried)}: ") if of_one else one.title for one in groups}


def verdict_table(label: str, verdicts: Sequence[Verdict], judged: Mapping[str, JudgedRun] | None = None) -> Table:
    """A table with a row for each verdict. With the judged runs (by id) also the config, our kernels' launches, the error
    against the oracle, and every reason."""
    rows = []
    for row in verdicts:
        run = judged[row.run] if judged else None
        reason = row.reason if run or row.verdict in ("undecided", "refused") else None
        launches = run.launches(row) if run and row.origin != "peer" else []
        cells = [
            Cell(row.problem, (row.config or None) if run else None),
            Cell(row.kernel, _launch_in_words(launches)),
            Cell(microseconds(row.time_ns)),
            Cell(significant(row.tflops)),
            Cell(row.rival or "", f"{microseconds(row.rival_time_ns)} µs" if run and row.rival_time_ns else None),
            Cell(f"{ratio(row.ratio)}x" if row.ratio is not None else ""),
            Cell(within(row.low, row.high)),
            Cell(row.label, "; ".join(filter(None, (reason, *row.remarks))) or None, row.verdict),
        ]
        if run:
            cells += map(Cell, (significant(row.gbps), _error_in_words(run.error(row)), str(row.pairs or "")))
        rows.append(Row(tuple(cells), row.origin or ""))
    return Table("verdicts", label, _VERDICTS + _DETAILS if judged else _VERDICTS, rows)


def _error_in_words(row: CorrectnessRow | None) -> str:
    if row is None:
        return ""
    one = row.tightest
    return f"{one.nonfinite} NaN or Inf" if one.max is None else f"{one.max:.2e} of {one.bound_max:.2e}"


def _launch_in_words(launches: Sequence[SeenLaunch]) -> str | None:
    """The launch with the most threads, and the number of others."""
    if not launches:
        return None
    one = max(launches, key=lambda seen: seen.threads)
    blocks = count(math.prod(one.grid), "block")
    words = f"{blocks} of {math.prod(one.block)} threads, {one.shared_bytes / 1024:.3g} KiB shared"
    if one.registers is not None:
        words += f", {one.registers} registers"
    more = sum(seen.count for seen in launches) - 1
    return words + (f", and {more} more" if more else "")


def group_bars(groups: Sequence[Group]) -> Bars:
    """A bar each group: the geometric mean of its ratios, and the least of them."""
    bars = []
    for group in groups:
        if group.mean is not None:
            label = f"{', '.join(group.tried) or group.suite}, {group.gpu}{', warm' * (group.cache == 'warm')}"
            note = f"worst {times(group.measured[0].ratio)} of {count(len(group.measured), 'problem')}"
            bars.append(Bar(label, group.mean.ratio, note, call(group.mean)))
    return Bars(tuple(bars))


def group_verdicts(group: Group, judged: Mapping[str, JudgedRun]) -> Iterator[Block]:
    """The verdict of each problem, then those of every kernel, where there are more."""
    yield verdict_table(f"Verdicts, {group.title}", group.front, judged)
    if len(group.rows) > len(group.front):
        every = f"Every kernel: {count(len(group.rows), 'verdict')}"
        yield Fold(every, (verdict_table(f"Every kernel, {group.title}", group.rows, judged),), page_only=True)


def candidate_summary(one: Candidate) -> Iterator[Block]:
    """The result on a user's kernel, its promise, and the reasons for which it was refused."""
    yield Heading(one.name)
    lead, _, found = one.headline.partition(": ")
    yield Paragraph(found, "big", f"{lead}:", one.verdict)
    if one.promise:
        yield Paragraph(one.promise)
    whole = one.verdict == "refused"
    for reason in one.refusals[whole:][:_MOST_REASONS]:  # of a kernel that was refused as a whole the first is the headline
        yield Paragraph(reason, lead="refused:" if whole else "refused in part:", state="refused")


def claim_table(claims: Sequence[ClaimResult]) -> Table:
    """Each claim with its measurement, the runs that give its number, and what is wrong or missing."""
    rows = []
    for one in claims:
        details = [f"{one.why}{' (the records show the contrary)' if one.refuted else ''}"] if one.why else []
        if one.worst_problem:
            details.append(f"worst is {one.worst_problem}")
        if one.runs:
            details.append(f"runs {', '.join(one.runs)}{' (quick: few samples)' if one.quick else ''}")
        cells = (
            Cell(f"{one.claim.id}: {' '.join(one.claim.text.split())}", claim_scope(one.claim)),
            Cell(f"{one.claim.statistic} {one.claim.demand}"),
            Cell(one.claim.figure(one.measured)),
            Cell(one.claim.figure(one.low, one.high)),
            Cell(str(one.problems or "")),
            Cell(one.outcome, "; ".join(details), one.outcome.split()[0]),
        )
        rows.append(Row(cells))
    return Table("claims", "Claims", _CLAIMS, rows)


def claim_scope(claim: Claim) -> str:
    """The verdicts that a claim is about, in words."""
    suite = "every suite" if claim.suite == ANY else claim.suite
    sizes = {"D": claim.head_dim, "S from": claim.min_seqlen, "S to": claim.max_seqlen}
    of = (claim.problem, claim.op, claim.dtype, claim.mask, *(f"{name} {size}" for name, size in sizes.items() if size))
    where = (f"{suite} on {claim.gpu}", f"{claim.clock} clock", f"{claim.cache} cache", *of, count(claim.problems, "problem"))
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


def diagnosis_blocks(one: Diagnosis, gave: Gained | None) -> Iterator[Block]:
    """The facts about a kernel, its share of each ceiling, every cause with its evidence, the changes that these call for, and
    the gain of changes that an earlier diagnosis called for."""
    facts, launch = one.facts, one.facts.launch
    yield Heading(facts.kernel, f"{f'({facts.config}) ' if facts.config else ''}on {facts.problem}, {facts.machine}")
    found = [f"{time.time_ns / 1e3:.4g} us on the {clock} clock" for clock, time in facts.times.items()]
    if launch is not None:
        registers = "" if launch.registers is None else f", {launch.registers} registers a thread"
        found.append(f"{facts.blocks} blocks of {facts.threads} threads{registers}, {launch.shared_bytes} B of shared memory")
    yield Paragraph("; ".join(found) or "no time on record")
    yield from (Paragraph(refusal, lead="refused:", state="refused") for refusal in facts.refusals)
    if facts.counters_absent:
        yield Paragraph(f"no counters: {facts.counters_absent}", "dim")
    if one.point is not None and one.point.needs:
        shares = tuple((need.ceiling.level, f"{need.share:.1%} of {need.ceiling}", "") for need in one.point.needs)
        yield Fold(f"Shares of ceilings: {len(shares)}", (Definitions(shares),))
    for status in ("supported", "untested", "ruled out"):
        causes = [cause for cause in one.hypotheses if cause.status == status]
        if causes:
            alike = grouped(causes, lambda cause: cause.evidence)  # several wait for the same counters
            items = (
                ("; ".join(cause.title for cause in some), evidence, status.split()[0]) for evidence, some in alike.items()
            )
            if status == "supported":
                yield Definitions(tuple(items), page_only=False)
            else:
                yield Fold(f"{status.capitalize()}: {len(causes)}", (Definitions(tuple(items)),))
    yield Paragraph(one.cause, lead="cause:")
    yield from _plan(one)
    if gave is not None:
        since = f"since run {gave.before_run}, measured in run {gave.run} ({gave.how})"
        interval = f" [{within(gave.low, gave.high)}]" if gave.low else ""
        yield Paragraph(f"{times(gave.ratio)}{interval} by all that changed {since}", lead="gained:", state="holds")
        changes = (
            (done.key, f"{done.change.what}: {times(done.change.most_gain)} at most", "")
            for done in gave.changes
            if done.change
        )
        yield Definitions(tuple(changes), page_only=False)


def _plan(one: Diagnosis) -> Iterator[Block]:
    """The changes by the most that each can give, the greatest first, and what they give together."""
    binding, time_ns = one.point.binding if one.point else None, one.facts.time_ns
    if time_ns and binding:
        limit = f"{binding.ceiling.level}: {binding.ceiling}"
        least = f"{binding.least_ns / 1e3:.4g} us is the least that the binding ceiling lets it take ({limit})"
        yield Paragraph(f"{time_ns / 1e3:.4g} us; {least}", "dim")
    if not one.plan:
        yield Paragraph("no change is called for by what is on record", "dim")
        return
    rows = []
    for cause in one.plan:
        if (change := cause.change) is not None:
            faster = "removed" if math.isinf(change.speedup) else f"{change.speedup:.3g}x"
            together = f"{times(change.together)}{' (the ceiling)' if change.capped else ''}"
            cells = (cause.key, change.clock or "", f"{change.part:.0%}", faster, times(change.most_gain), together)
            rows.append(Row((Cell(change.what, change.how), *map(Cell, cells))))
    yield Table("plans", f"Plan for {one.facts.kernel} on {one.facts.problem}", _PLAN, rows)
