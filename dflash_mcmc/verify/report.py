"""The text, the JSON and the page of an audit. The verdict is in the first line."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from dflash_mcmc.errors import writing
from dflash_mcmc.report import build, figure, parts
from dflash_mcmc.store.files import write_atomically
from dflash_mcmc.verify.audit import Audit, other_order
from dflash_mcmc.verify.behaviour import Finding


def verdict(found: Audit) -> str:
    """The verdict in a sentence."""
    size = f"{found.tokens:,} tokens of {found.texts:,} texts" + (
        f" ({found.left_out:,} more are left out, behind one that is missing or could not be drawn)" if found.left_out else "")
    impossible = len(found.outside) - found.near_ties
    if impossible:
        name, place, distance = max(found.outside, key=lambda each: each[2])
        farthest = f"{distance:.2f} nats below those that it keeps" if math.isfinite(distance) else "no token of the law"
        return (f"RED: {impossible:,} of {size} are tokens that the stated law cannot draw; the farthest is {farthest} "
                f"({name}, token {place})"
                + (f"; it can draw all of them if {other_order(found.law)}" if found.law and found.kept_otherwise else ""))
    if found.together.red_at is not None:
        return (f"RED after {found.together.red_at:,} tokens: the texts do not follow the stated law; best explanation: "
                f"{found.bets[found.best].says} (evidence 10^{found.each[found.best].evidence:.1f}; {size})")
    if found.is_red:
        assert found.log_p_error is not None
        return f"RED: the stated log p is off by {found.log_p_error[0]:.3f} nats a token on average ({size})"
    if found.law is None:
        return ("GREEN: the stated log p is right. The law of a token has no test here: the texts are states of a chain, or "
                f"were drawn until one ended (dataset.must_end) ({size})")
    if found.top is None:
        return f"GREEN: every token is the most likely one ({size})"
    return (f"GREEN: no evidence against the stated law in {size} (10^{found.together.evidence:.1f}, red at "
            f"10^{round(-math.log10(found.level), 1):g}); excluded: most likely tokens {-100 * found.top.low:.1f} points too "
            f"rare or {100 * found.top.high:.1f} points too often")


def tables(found: Audit) -> list[parts.ReportTable]:
    """The tables: the bets with the largest evidence, and what else was measured."""
    if found.top is None:
        return []
    order: list[int] = []  # the best bet of each kind; the JSON has all
    placed = [place for place, each in enumerate(found.each) if each.largest or each.evidence]  # without steps none is
    for place in sorted(placed, key=lambda place: -found.each[place].evidence):
        if found.bets[place].group not in (found.bets[other].group for other in order):
            order.append(place)
    bets = [{"kind": found.bets[place].group, "says": found.bets[place].says, **found.each[place]._asdict()}
            for place in order]
    columns = {"departure": "kind", "what the bet says": "says", "evidence": lambda row: f"10^{row['evidence']:.1f}",
               "red after tokens": ("red_at", ",")}
    shares = [{"share": "most likely token", **found.top._asdict()}]
    shifts = {"share of tokens": "share", "drawn - stated, points": lambda row: f"{100 * row['value']:+.2f}",
              "interval": lambda row: f"{100 * row['low']:+.2f} to {100 * row['high']:+.2f}"}
    return [parts.ReportTable("bets", f"The best bet of each kind, of {len(found.bets)}", columns, bets),
            parts.ReportTable("shift", "What was drawn against what the law expects", shifts, shares)]


_OF_SPECULATION = ("temperature", "most likely token", "first token", "repeated prompt", "place in a block")
"""The kinds of departure that wrong verification of drafted tokens shows as, too."""


def notes(found: Audit) -> list[str]:
    """What limits the verdict."""
    said = []
    if found.near_ties:
        said.append(f"{found.near_ties} tokens lie outside of the law's support by at most {found.near:g} nats, or where "
                    "rounding moves the bound of top-p or min-p: near-ties. They count neither for nor against the law.")
    if found.left_out:
        said.append(f"{found.left_out} texts follow the first one that the run lacks, by problem and chain, and are left out: "
                    "answers that end first are the short and likely ones. The command of the run draws the rest.")
    if found.together.red_at is not None and found.bets[found.best].group in _OF_SPECULATION:
        said.append("Where the engine drafts tokens, a fault of speculation fits this as well: a residual that is not "
                    "normalised, a bonus token from the draft, keys of a rejected token in the cache. Draw the same texts "
                    "without the draft: if they are green, the speculation is wrong.")
    if found.is_red and found.defaults:
        said.append(found.defaults)
    if found.log_p_error is not None:
        mean, most = found.log_p_error
        said.append(f"Stated and recomputed log p differ by {mean:.2g} nats a token on average, and by at most {most:.2g}.")
    return said


def of_findings(found: Sequence[Finding]) -> parts.Section:
    """The section on what is promised besides the law. The wrong ones come first."""
    order = ("red", "wrong", "differs", "not offered", "right")
    rows = [each._asdict() for each in sorted(found, key=lambda each: order.index(each.outcome))]
    columns = {"check": "check", "outcome": "outcome", "what was found": "says"}
    table = parts.ReportTable("behaviour", "Seeds, batches, log p, stop strings and lengths", columns, rows)
    return parts.Section("behaviour", "Besides the law", ["`differs` is measured, `wrong` is a fault."], [table])


def broken(more: Sequence[parts.Section]) -> list[str]:
    """The names of the promises besides the law that are wrong."""
    return [str(row["check"]) for section in more for row in section.tables[0].rows if row.get("outcome") == "wrong"]


def first_line(found: Audit, more: Sequence[parts.Section] = ()) -> str:
    """The verdict on the law, after what is wrong besides it."""
    at = f"At {found.at}: " if found.at else ""
    return (f"RED besides the law: {', '.join(wrong)}. The law: " if (wrong := broken(more)) else "") + at + verdict(found)


def text(found: Audit, more: Sequence[parts.Section] = ()) -> str:
    """The verdict, the tables and the notes for a terminal."""
    besides = [each for section in more for each in (*map(parts.as_text, section.tables), *section.text)]
    return "\n\n".join([first_line(found, more), *(parts.as_text(table) for table in tables(found)), *notes(found), *besides])


def write(found: Audit, folder: Path, title: str, more: Sequence[parts.Section] = ()) -> None:
    """Writes the page report.html with its tables and figure, report.md, and verify.json. Raises UserError.

    Args:
        more: what was measured besides the law of the texts, a table each.
    """
    drawings = [parts.Drawing("fig_evidence", "Evidence against the stated law after each text", lambda: _course(found))]
    section = parts.Section("law", "The law of a token", [*notes(found), _EXPLAINED], tables(found),
                      drawings if found.top is not None else ())
    build.write(folder, first_line(found, more), [parts.ReportPart("", title, (), [section, *more])])
    with writing(folder / "verify.json"):
        measured = {"title": title} | values(found) | {section.name: section.tables[0].rows for section in more}
        write_atomically(folder / "verify.json", json.dumps(measured, indent=1) + "\n")


_EXPLAINED = (
    "Each row is a bet that another law explains the tokens. Evidence 10^3 means that the bet has multiplied its stake by "
    "1,000, which happens to a right engine with a probability of at most 1 in 1,000, whenever one looks. All bets together "
    "decide. The largest says what is wrong.")


def values(found: Audit) -> dict[str, object]:
    """Everything that was measured, for JSON."""
    law = found.law and {**found.law.fields(), **({"function": found.law.function_name} if found.law.function else {})}
    return {"red": found.is_red, "verdict": verdict(found), "law": law, "level": found.level,
            "texts": found.texts, "tokens": found.tokens, "left_out": found.left_out,
            "together": found.together._asdict(), "top": found.top and found.top._asdict(),
            "near_ties": found.near_ties, "log_p_error": found.log_p_error, "outside": [
                {"text": name, "token": place, "nats": distance if math.isfinite(distance) else None}
                for name, place, distance in found.outside],
            "bets": [{**bet._asdict(), **each._asdict()} for bet, each in zip(found.bets, found.each, strict=True)]}


def _course(found: Audit) -> "figure.Figure":
    made, (axes,) = figure.panels((7.5, 3.4))
    colour = figure.WRONG if found.is_red else figure.RIGHT
    axes.plot(found.course[:, 0], found.course[:, 1], color=colour)
    axes.axhline(-math.log10(found.level), color=figure.INK, linewidth=0.9, linestyle="--", label="red from here on")
    axes.set(xlabel="tokens", ylabel="evidence, powers of ten")
    axes.legend()
    return made
