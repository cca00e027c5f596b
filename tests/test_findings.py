"""The tables of docs/findings, computed again from the stored records by the standard library alone."""

import json
import math
import operator
import re
import statistics
import tarfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import pages

ROOT = Path(__file__).resolve().parents[1]
FINDINGS = ROOT / "docs/findings"
ROW = re.compile(r"^\| `(?P<run>[^`]+)` \| (?P<correct>\d+) of (?P<total>\d+) \| (?P<accuracy>[\d.]+) \[(?P<low>[\d.]+), "
                 r"(?P<high>[\d.]+)\] \| (?P<difference>[-+][\d.]+|) \| (?P<won>\d*) \| (?P<lost>\d*) \| (?P<p>(?:< )?[\d.]*) "
                 r"\| (?P<tokens>[\d,]+) \|$", re.MULTILINE)
"""A row of a table of runs: correct, accuracy with Wilson's interval, difference to greedy, won, lost, p, token-forwards."""


DRAWS = re.compile(r"^\| (?P<temperature>[\d.]+) \| (?P<draws>\d+) \| (?P<problems>\d+) \| (?:(?P<majority>[\d.]+) \| )?"
                   r"(?P<best>[\d.]+) \| (?P<any>[\d.]+) \| (?P<tokens>[\d,]+) \|$", re.MULTILINE)
"""A row of a table of independent draws: shares of problems in %, and the token-forwards of all draws of a problem."""


class Run(NamedTuple):
    """A run of an archive: what it is, and its records by problem and chain."""

    identity: dict
    draws: dict[str, dict[int, dict]]

    @property
    def records(self) -> dict[str, dict]:
        """The first draw of each problem."""
        return {problem: draws[0] for problem, draws in self.draws.items()}


def stored(name: str) -> dict[str, Run]:
    """The runs of a packed experiment by folder. Each process that drew a share of a run wrote a file of its own."""
    runs: dict[str, Run] = {}
    with tarfile.open(FINDINGS / "records" / f"{name}.tar.xz") as archive:
        for member in archive:
            folder, file = member.name.split("/")[1:]
            run = runs.setdefault(folder, Run({}, {}))
            if file == "run.json":
                run.identity.update(json.load(archive.extractfile(member))["identity"])
            elif file.startswith("records."):
                lines = map(json.loads, archive.extractfile(member).read().decode().splitlines())
                for record in lines:
                    run.draws.setdefault(record["problem"], {})[record["chain"]] = record
    return runs


def wilson(correct: int, total: int, z: float = 1.959964) -> tuple[float, float]:
    share, spread = correct / total, z * math.sqrt(correct * (total - correct) / total**3 + (z / total) ** 2 / 4)
    middle, scale = share + z * z / (2 * total), 1.0 + z * z / total
    return (middle - spread) / scale, (middle + spread) / scale


def mcnemar(won: int, lost: int) -> float:
    """Two-sided exact test: the chance that as few of won + lost fair coins agree."""
    tosses, few = won + lost, min(won, lost)
    return min(1.0, 2.0 * sum(math.comb(tosses, heads) for heads in range(few + 1)) / 2**tosses)


PAGES = sorted(path for path in FINDINGS.glob("*.md") if ROW.search(path.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_table_follows_from_the_records(page):
    text = page.read_text()
    name = re.search(r"records/(\w+)\.tar\.xz", text)[1]
    runs, folders = stored(name), dict(re.findall(r"^\| `([^`]+)` \| `([\w.=-]+)` \|", text, re.MULTILINE))
    rows = [row.groupdict() for row in ROW.finditer(text)]
    assert len(rows) == len(folders) >= 2
    base = {problem: record["verdict"] == "correct" for problem, record in runs[folders["greedy"]].records.items()}
    for row in rows:
        records = runs[folders[row["run"]]].records
        right = {problem: record["verdict"] == "correct" for problem, record in records.items()}
        low, high = (100 * end for end in wilson(sum(right.values()), len(right)))
        forwards = sum(record["token_forwards"] for record in records.values()) / len(records)
        assert (int(row["correct"]), int(row["total"])) == (sum(right.values()), len(right))
        assert (row["accuracy"], row["low"], row["high"]) == tuple(
            f"{value:.1f}" for value in (100 * sum(right.values()) / len(right), low, high))
        assert row["tokens"] == f"{forwards:,.0f}"
        if row["run"] != "greedy":
            assert set(right) <= set(base)  # a run may have the first problems alone
            won, lost = sum(right[one] > base[one] for one in right), sum(right[one] < base[one] for one in right)
            p = mcnemar(won, lost)
            assert (row["won"], row["lost"], row["p"]) == (str(won), str(lost), f"{p:.2f}" if p >= 0.005 else "< 0.01")
            assert row["difference"] == f"{100 * (won - lost) / len(right):+.1f}"


def majority(draws: list[dict]) -> bool:
    """Whether the answer of most draws is right; of several such answers, the one that was drawn first."""
    votes = Counter(draw["answer"] for draw in draws if draw["answer"] is not None)
    leaders = [draw for draw in draws if draw["answer"] is not None and votes[draw["answer"]] == max(votes.values())]
    return bool(leaders) and leaders[0]["verdict"] == "correct"


def likeliest(draws: list[dict]) -> bool:
    return max(draws, key=lambda draw: draw["log_p"])["verdict"] == "correct"


def solved(draws: list[dict]) -> bool:
    return any(draw["verdict"] == "correct" for draw in draws)


@pytest.mark.parametrize("page", [path for path in PAGES if DRAWS.search(path.read_text())], ids=lambda page: page.stem)
def test_the_table_of_draws_follows_from_the_records(page):
    text = page.read_text()
    runs = stored(re.search(r"records/(\w+)\.tar\.xz", text)[1])
    folders = {temperature: folder for folder, temperature in re.findall(r"`(temperature-[\w-]+)` \(([\d.]+)\)", text)}
    rows = [row.groupdict() for row in DRAWS.finditer(text)]
    assert len(rows) >= 8
    for row in rows:
        chains = range(int(row["draws"]))
        every = runs[folders[row["temperature"]]].draws.values()
        first = [[draws[chain] for chain in chains] for draws in every]
        if row["draws"] == "1":  # a mean over all draws
            first = [[draw] for draws in every for draw in draws.values()]
        shares = {"majority": majority, "best": likeliest, "any": solved}
        for column, right in shares.items():
            if row[column] is not None:
                assert row[column] == f"{100 * sum(map(right, first)) / len(first):.1f}", (row, column)
        forwards = sum(draw["token_forwards"] for draws in first for draw in draws)
        forwards -= sum(draw["prompt_forwards"] for draws in first for draw in draws[1:])  # draws of a problem read it once
        forwards /= len(first)
        assert (row["problems"], row["tokens"]) == (str(len(every)), f"{forwards:,.0f}")


@pytest.mark.slow
def test_equal_likelihood_is_not_equal_answers():
    said, runs = " ".join((FINDINGS / "equal-cost-on-gsm8k.md").read_text().split()), stored("cost_gsm8k")
    drawn = runs["temperature-gsm8k-fcebb28b0fc5"].draws
    best = {one: max((draws[chain] for chain in range(8)), key=lambda draw: draw["log_p"]) for one, draws in drawn.items()}
    chain = {one: runs["power_mh-gsm8k-a02f13a9a918"].records[one] for one in best}
    likely = [statistics.mean(record["log_p"] for record in each.values()) for each in (chain, best)]
    right = [{one for one, record in each.items() if record["verdict"] == "correct"} for each in (chain, best)]
    won, lost = len(right[0] - right[1]), len(right[1] - right[0])
    assert f"same mean log p, {likely[0]:.1f} and {likely[1]:.1f}" in said
    assert (f"solve {100 * len(right[0]) / len(best):.1f} and {100 * len(right[1]) / len(best):.1f} %: {won} problems against "
            f"{lost}, p = {mcnemar(won, lost):.3f}") in said
    programs = stored("cost_code")
    right = [{one for one, record in programs[f"power_mh-humaneval-{of}"].records.items() if record["verdict"] == "correct"}
             for of in ("4d8a8e9c4702", "7c88fa6dcbfc")]
    steps = " ".join((FINDINGS / "steps-on-programs.md").read_text().split())
    assert f"wins {len(right[0] - right[1])} problems against it and loses {len(right[1] - right[0])}" in steps


def slopes_over(right: dict[float, dict[str, bool]]) -> list[float]:
    """The slope over beta of each problem's verdict, in points per 0.1."""
    middle = statistics.mean(right)
    squares = sum((beta - middle) ** 2 for beta in right)
    return [10 * sum((beta - middle) * of[problem] for beta, of in right.items()) / squares for problem in sorted(right[0.0])]


def flipped(slopes: list[float]) -> float:
    """Two-sided p of the mean if both signs of each slope are equally likely."""
    differing = [slope for slope in slopes if abs(slope) > 1e-9]
    sums = [abs(sum(map(operator.mul, differing, signs))) for signs in product((1, -1), repeat=len(differing))]
    return statistics.mean(each >= abs(sum(differing)) - 1e-9 for each in sums)


def interval(slopes: list[float], widest: float) -> tuple[float, float]:
    """Student's interval with a problem more on each side, whose slope is the widest that a problem can have."""
    added = [*slopes, widest, -widest]
    quantile = 1.959964 + (1.959964**3 + 1.959964) / (4 * (len(added) - 1))  # Cornish and Fisher
    half = quantile * statistics.stdev(added) / math.sqrt(len(added))
    return statistics.mean(added) - half, statistics.mean(added) + half


def widest_slope(betas: list[float]) -> float:
    """Of a problem that is right above the mean beta alone, in points per 0.1."""
    away = [beta - statistics.mean(betas) for beta in betas]
    return 10 * sum(max(each, 0.0) for each in away) / sum(each**2 for each in away)


BETAS = (-0.2, -0.1, -0.05, 0.0, 0.05, 0.1, 0.2)


def source(identity: dict) -> str:
    """What a blend mixes in: layer 21, layer 12, or layer 21 in a random direction."""
    return "random" if identity["blend.direction"] == "random" else "layer 12" if identity["blend.layer"] == 12 else "layer"


@pytest.mark.slow
def test_the_curves_on_all_problems_follow_from_the_records():
    """Correct answers, slopes and texts that differ, by sampler and direction; both directions share beta 0."""
    page, runs = (FINDINGS / "sign-of-beta.md").read_text(), {}
    said = " ".join(page.split())
    for run in stored("signflip164").values():
        assert len(run.records) == 164
        if (beta := run.identity.get("blend.beta")) is not None:
            runs.setdefault((run.identity["sampler"], source(run.identity)), {})[beta] = run.records
    sources = ("layer", "layer 12", "random")
    curves = [curve for curve in product(("power_mh", "temperature", "greedy"), sources) if curve in runs]
    assert set(curves) == set(runs)
    for curve in curves:
        runs[curve][0.0] = runs[curve[0], "layer"][0.0]
    right = {curve: {beta: {one: record["verdict"] == "correct" for one, record in records.items()}
                     for beta, records in of.items()} for curve, of in runs.items()}
    slopes = {curve: slopes_over(of) for curve, of in right.items()}
    cells = r"((?: \d* \|){7})"
    table = re.findall(rf"^\| `(\w+)` \| (layer|layer 12|random) \|{cells} (.*) \|$", page, re.MULTILINE)
    assert [row[:2] for row in table] == curves
    for sampler, direction, counts, slope in table:
        of = right[sampler, direction]
        assert [text.strip() for text in counts.split("|")[:7]] == [
            str(sum(of[beta].values())) if beta in of else "" for beta in BETAS]
        mine = slopes[sampler, direction]
        low, high = interval(mine, widest_slope(list(of)))
        assert slope == f"{statistics.mean(mine):z.1f} ({low:.1f} to {high:.1f})"
    texts = re.findall(rf"^\| `(\w+)` \| (layer|layer 12|random) \|{cells}$", page, re.MULTILINE)
    assert [row[:2] for row in texts] == curves
    for sampler, direction, counts in texts:
        of = runs[sampler, direction]
        assert [text.strip() for text in counts.split("|")[:7]] == [
            str(sum(of[beta][one]["text"] != of[0.0][one]["text"] for one in of[0.0])) if beta in of and beta else ""
            for beta in BETAS]
    p, random_p = (flipped(slopes["power_mh", direction]) for direction in ("layer", "random"))
    assert f"p = {p:.3f} for the layer and {random_p:.3f} for the random direction" in said
    flip = list(map(operator.sub, slopes["power_mh", "layer"], slopes["greedy", "layer"]))
    random_flip = list(map(operator.sub, slopes["power_mh", "random"], slopes["greedy", "random"]))
    advantage = list(map(operator.sub, slopes["power_mh", "layer"], slopes["power_mh", "random"]))
    other_flip = list(map(operator.sub, slopes["power_mh", "layer 12"], slopes["greedy", "layer 12"]))
    for text, each in (("slopes of the two samplers differ by", flip), ("with the random direction by", random_flip),
                       ("slope minus that of the random direction is", advantage),
                       ("power sampling minus that of greedy decoding is", other_flip)):
        reach = 1.96 * statistics.stdev(each) / math.sqrt(len(each))
        mean = statistics.mean(each)
        assert f"{text} {mean:.1f} points ({mean - reach:.1f} to {mean + reach:.1f})" in said


@pytest.mark.slow
def test_the_controls_on_all_problems_follow_from_the_records():
    """Each run against the same sampler at beta 0; `two products` are of the conditions."""
    page, runs = (FINDINGS / "sign-of-beta.md").read_text(), {}
    for run in stored("signflip164").values():
        sampler, beta = run.identity["sampler"], run.identity.get("blend.beta")
        name = f"beta {beta:g}" if beta is not None else f"alpha {run.identity['sampler.alpha']:g}"
        colder = beta is None and run.identity["sampler.proposal_temperature"] == 0.25
        kind = "layer" if beta is None else source(run.identity)
        runs[sampler, f"{kind} " * (kind != "layer") + name + ", colder proposals" * colder] = run.records
    for run in stored("programs").values():
        published = "published" in (run.identity.get("sampler.rule"), run.identity.get("sampler.schedule"))
        if run.identity["blend"] == "none" and not published:
            runs[run.identity["sampler"], "two products"] = run.records
    rows = re.findall(r"^\| `(\w+)` \| ((?:random |layer 12 )?beta [-\d.]+|alpha [^|]+|two products) \| (\d+) "
                      + r"\| ([\d.]*) " * 4 + r"\|$", page, re.MULTILINE)
    assert {row[:2] for row in rows} >= {each for each in runs if each[0] != "temperature" and "beta" not in each[1]}
    assert len(rows) >= 10
    for sampler, name, correct, *shown in rows:
        mine, base = runs[sampler, name], runs[sampler, "beta 0"]
        right, before = ({one: record["verdict"] == "correct" for one, record in each.items()} for each in (mine, base))
        assert int(correct) == sum(right.values())
        won, lost = sum(right[one] > before[one] for one in right), sum(right[one] < before[one] for one in right)
        others = sum(mine[one]["text"] != base[one]["text"] for one in mine)
        assert shown == [str(others), str(won), str(lost), f"{mcnemar(won, lost):.2f}"]


@pytest.mark.slow
def test_accepted_and_moving_proposals_follow_from_the_records(tmp_path, monkeypatch, capsys):
    """The script that stands on the page prints each row of both tables."""
    page, both = FINDINGS / "sign-of-beta-on-gsm8k.md", []
    (script,) = (block for block in re.findall(r"^```text\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
                 if block.startswith("import"))
    for name in ("gpu_gsm8k", "signflip_gsm8k", "signflip164"):
        with tarfile.open(FINDINGS / "records" / f"{name}.tar.xz") as archive:
            archive.extractall(tmp_path, filter="data")
    blends = {(source(run.identity), f"{run.identity['blend.beta']:g}"): f"signflip164/{folder}"
              for folder, run in stored("signflip164").items()
              if run.identity["sampler"] == "power_mh" and "blend.beta" in run.identity}
    named = dict(re.findall(r"^\| (`[^`]+`) \| `([\w.=-]+)` \|$", page.read_text(), re.MULTILINE))
    row = r"^\| ([^|]+) \| ([^|]+) \| ([-+]\d\.\d\d \(.*)\|$"
    for first, second, cells in re.findall(row, page.read_text(), re.MULTILINE):
        pair = ([f"gpu_gsm8k/{folder}" for folder in ("layer-power_mh-gsm8k-62c3643610b5", "power_mh-gsm8k-5538fcd3afd8")]
                if second == "1,319" else [f"signflip_gsm8k/{named[run]}" for run in (first, "`ps`")])
        both.append((cells, pair))
    for kind, beta, cells in re.findall(row, (FINDINGS / "sign-of-beta.md").read_text(), re.MULTILINE):
        both.append((cells, [blends[kind, beta], blends["layer", "0"]]))
    assert len(both) == 4 + 14
    for cells, pair in both:
        monkeypatch.setattr("sys.argv", ["moves.py", *(str(tmp_path / folder) for folder in pair)])
        exec(script, {})
        assert capsys.readouterr().out.replace("\n", "").strip(" |") == cells.strip(" |")


def test_every_archive_has_a_page_and_names_no_machine():
    texts = "\n".join(path.read_text() for path in FINDINGS.glob("*.md"))
    archives = sorted((FINDINGS / "records").glob("*.tar.xz"))
    assert archives
    assert sum(path.stat().st_size for path in archives) < 40e6
    for path in archives:
        assert path.name in texts
        assert path.stat().st_size < 15e6
        with tarfile.open(path) as archive:
            for member in archive:
                if member.name.endswith(("run.json", "config.yaml")):
                    text = archive.extractfile(member).read().decode()
                    assert not re.search(r"(?<![\w./:])/[\w.+-]+/", text), member.name


@pytest.mark.slow
def test_the_report_of_the_stored_runs_has_the_page_s_numbers(tmp_path):
    """The two commands of the page, in a folder with the documentation."""
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    for command in pages.marked(pages.commands(FINDINGS / "index.md"), pages.IN_A_CHECKOUT):
        done = pages.run(command, tmp_path)
        assert done.returncode == 0, done.stderr[-2000:]
    for row in map(re.Match.groupdict, ROW.finditer((FINDINGS / "conditions-on-programs.md").read_text())):
        label = row["run"].split(",")[0]
        shown = rf"\| {label}( \w+=\w+)* +\| +{row['correct']} \| +{row['total']} \| +{row['accuracy']} % \|"
        assert re.search(shown, done.stdout), shown


def test_the_readme_has_the_page_s_numbers():
    def numbers(path: Path, names: int) -> list[list[str]]:  # the cells of a row after those that name it
        rows = re.findall(r"^\|(.*, \d+ \|.*|.*\| {2}\|.*)\|$", path.read_text().replace("*", ""), re.MULTILINE)
        return [[cell.strip() for cell in row.split("|")][names:] for row in rows]

    table, page = numbers(ROOT / "README.md", 1), numbers(FINDINGS / "evidence.md", 2)
    assert len(table) == 6
    assert all(row in page for row in table), table


def test_the_tables_of_the_probes_follow_from_the_records():
    """Ranks by reader and by block, and what chains do with each proposal, from the lists of the records."""
    page, found = (FINDINGS / "probes-on-a-real-pair.md").read_text(), {}
    for run in stored("probes05").values():
        found[run.identity["probe"]] = [record for record in run.records.values() if "skipped" not in record]
    read, chains = found["deep_readout"], found["speculative_mcmc"]
    assert (len(read), len(chains)) == (128, 128)
    readers = {name: [rank for record in read for rank in record["rank"][name]] for name in read[0]["rank"]}
    sure = [p for record in read for p in record["p"]["target"]]
    rows = re.findall(r"^\| `(\w+)` \| ([\d,.]+) \| ([\d.]+) \| ([\d.]*) \| ([\d,]+) \| [\d,]* \|$", page, re.MULTILINE)
    assert {name for name, *_ in rows} == set(readers)
    for name, mean, median, better, hard in rows:
        ranks, target = readers[name], readers["target"]
        assert (mean, float(median)) == (f"{statistics.mean(ranks):,.1f}", statistics.median(ranks))
        assert better == ("" if name == "target" else f"{100 * statistics.mean(map(operator.lt, ranks, target)):.1f}")
        assert hard == f"{statistics.mean(rank for rank, p in zip(ranks, sure, strict=True) if p < 0.01):,.0f}"
    blocks = [block for record in read for block in record["block"]]
    again = [(mask, rank) for mask, rank, block in zip(readers["mask"], readers["reinject"], blocks, strict=True)
             if block and block % 3 == 0]
    worse, better = (100 * statistics.mean(order(rank, mask) for mask, rank in again) for order in (operator.gt, operator.lt))
    assert f"{worse:.0f} % of the ranks get worse and {better:.0f} % better" in " ".join(page.split())
    assert statistics.median(abs(rank - mask) for mask, rank in again) == 2
    by_block = re.findall(r"^\| (\d) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", page, re.MULTILINE)
    assert len(by_block) == 6
    for number, *means in by_block:
        for name, mean in zip(("target", "mask", "gold", "random"), means, strict=True):
            here = [rank for rank, block in zip(readers[name], blocks, strict=True) if block == int(number)]
            assert mean == f"{statistics.mean(here):,.0f}"
    signals = re.findall(r"^\| `(?:(mean|max) )?(\w+)` \| (?:yes|no) \| ([\d.]+) \[.*\| ([\d.]+) \[.*\|$", page, re.MULTILINE)
    assert (len(signals), len(found["difficulty"])) == (8, 128)
    equations = [equation for record in found["difficulty"] for equation in record["steps"]]
    for statistic, name, *shown in signals:
        for cases, text in zip((found["difficulty"], equations), shown, strict=True):
            wrong, right = ([case[statistic][name] if statistic else case[name] for case in cases
                             if case.get("wrong", case.get("verdict") != "correct") == kind] for kind in (True, False))
            above = statistics.mean((one > other) + (one == other) / 2 for one in wrong for other in right)
            assert text == f"{above:.2f}", name
    layers, by_layer = found["layer_rank"], re.findall(r"^\| (\d+) " + r"\| ([\d,]+) " * 4 + r"\|$", page, re.MULTILINE)[6:]
    assert (len(layers), len(by_layer)) == (32, 11)
    for number, *means in by_layer:
        by_norm = [[record["ranks"][f"{number} {norm}"] for record in layers] for norm in ("none", "final")]
        hard = [[ranks[i] for record, ranks in zip(layers, each, strict=True) for i in record["hard"]] for each in by_norm]
        every = [[rank for ranks in each for rank in ranks] for each in by_norm]
        assert means == [f"{statistics.mean(ranks):,.0f}" for ranks in [*every, *hard]]
    blends = re.findall(r"^\| (?:layer )?(\d+|draft|flattened) \| ([\d.]*) " + r"\| ([-+\d.]*) " * 6 + r"\|$", page,
                        re.MULTILINE)
    assert [name for name, *_ in blends] == ["11", "17", "20", "21", "22", "draft", "flattened"]
    for name, divergence, *gains in blends:
        mine = [record for record in found["logit_blend"] if name in record["sums"]["hard"]]
        kl = [record["agreement"][name] for record in mine if name != "flattened"]
        assert divergence == (f"{sum(n for _, n, _ in kl) / sum(n for n, *_ in kl):.2f}" if kl else "")
        cells = [("hard", 1, ".3f"), ("hard", 3, ".2f"), ("all", 1, ".4f")]
        for (part, beta, form), *texts in zip(cells, gains[::2], gains[1::2], strict=True):
            sums = [record["sums"][each][name][beta] for record in mine
                    for each in (("hard", "easy") if part == "all" else (part,)) if name in record["sums"][each]]
            count, gain, over = (sum(cell[column] for cell in sums) for column in (0, 1, 6))
            assert texts == [f"{gain / count:+{form}}", "" if name == "flattened" else f"{over / count:+{form}}"]
    proposed = re.findall(r"^\| (?:draft at )?(target|1|0.25) \| (\w+) \| ([\d.]*) \| ([\d.]*)" + r" \| ([\d.]+)" * 3 + r" \|",
                          page, re.MULTILINE)
    assert len(proposed) == 5
    for name, weights, kl, tvd, *shares in proposed:
        mine = [record["proposals"][name] for record in chains]
        for column, text in (("kl", kl), ("tvd", tvd)):
            assert text == ("" if column not in mine[0] else f"{statistics.mean(x for one in mine for x in one[column]):.2f}")
        for column, text in zip(("acceptance", "equilibrium", "moved"), shares, strict=True):
            assert text == f"{100 * statistics.mean(x for one in mine for x in one[weights][column]):.1f}"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "archives", "problems", "tested"), [
    ("decomposition", ("decomposition", "cost_code"), 164, 3), ("base-model", ("base_model",), 128, 4)])
def test_rows_of_several_chains_follow_from_the_records(name, archives, problems, tested):
    """Rows, and the differences of their shares by problem with the normal approximation of a sign test."""
    page = (FINDINGS / f"{name}.md").read_text()
    runs = {folder: run for archive in archives for folder, run in stored(archive).items()}
    folders = dict(re.findall(r"^\| `([^`]+)` \| `([\w-]+)` \|$", page, re.MULTILINE))
    shares = {}
    for name, chains, correct, total, accuracy, log_p, proposals, accepted, moved, forwards in re.findall(
            r"^\| `([^`]+)` \| (\d) \| (\d+) of ([\d,]+) \| ([\d.]+) \| (\S+) \| ([\d.]+) \| (\S+) \| (\S+) \| (\d+) \|$",
            page, re.MULTILINE):
        draws = {problem: [of[chain]["verdict"] == "correct" for chain in range(int(chains))]
                 for problem, of in runs[folders[name]].draws.items()}
        records = [of[chain] for of in runs[folders[name]].draws.values() for chain in range(int(chains))]
        shares[name] = {problem: statistics.mean(of) for problem, of in draws.items()}
        assert (len(draws), f"{len(records):,}", sum(map(sum, draws.values()))) == (problems, total, int(correct))
        assert accuracy == f"{100 * statistics.mean(shares[name].values()):.1f}"
        found = {key: statistics.mean(record[key] for record in records)
                 for key in ("log_p", "proposals", "accepted", "moved", "token_forwards")}
        assert (log_p, proposals, forwards) == (f"{found['log_p']:.1f}", f"{found['proposals']:.1f}",
                                                f"{found['token_forwards']:.0f}")
        for key, shown in (("accepted", accepted), ("moved", moved)):
            assert shown == (f"{100 * found[key] / found['proposals']:.1f}" if found["proposals"] else "-")
    for vote, number, accuracy, forwards in re.findall(r"^\| `(majority of (\d), [^`]+)` \| ([\d.]+) \| (\d+) \|$",
                                                         page, re.MULTILINE):
        runs_of = runs[folders[vote.partition(", ")[2]]].draws
        draws = {problem: [of[chain] for chain in range(int(number))] for problem, of in runs_of.items()}
        shares[vote] = {problem: float(majority(of)) for problem, of in draws.items()}
        costs = [sum(one["token_forwards"] for one in of) - sum(one["prompt_forwards"] for one in of[1:])
                 for of in draws.values()]
        assert accuracy == f"{100 * statistics.mean(shares[vote].values()):.1f}"
        assert forwards == f"{statistics.mean(costs):.0f}"
    differences = re.findall(r"^\| `([^`]+)` over `([^`]+)` \| ([-+\d.]+) \[([-\d.]+), ([-\d.]+)\] \| (\d+), (\d+) \| "
                             r"([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(differences) == tested
    largest, ranks = 0.0, sorted(range(tested), key=lambda row: float(differences[row][-2]))
    for rank, (a, b, points, low, high, more, fewer, p, holm) in enumerate(differences[row] for row in ranks):
        by_problem = [shares[a][problem] - shares[b][problem] for problem in shares[a]]
        assert points == f"{100 * statistics.mean(by_problem):+.1f}"
        assert (int(more), int(fewer)) == (sum(each > 0 for each in by_problem), sum(each < 0 for each in by_problem))
        half = 196 * statistics.stdev(by_problem) / math.sqrt(len(by_problem))
        assert (float(low), float(high)) == pytest.approx((float(points) - half, float(points) + half), abs=0.6)
        z = abs(sum(by_problem)) / math.sqrt(sum(each**2 for each in by_problem))
        assert float(p) == pytest.approx(2 * (1 - statistics.NormalDist().cdf(z)), abs=0.002 + 0.3 * float(p))
        largest = min(1.0, max(largest, (4 - rank) * float(p)))  # families of four
        assert float(holm) == pytest.approx(largest, rel=0.05, abs=0.001)


def kept(draws: list[dict], rule: str) -> tuple[dict, int]:
    """The program that a rule of evidence keeps, and the draws that it needs."""
    for used, record in enumerate(draws if rule == "examples" else [], 1):
        if record.get("passed") == 1.0:
            return record, used
    most = max(record.get("passed", 0.0) for record in draws)
    among = [record for record in draws if not rule.startswith("examples") or record.get("passed", 0.0) == most]
    sizes = Counter(record.get("behaviour") for record in among) if rule in ("behaviour", "examples_vote") else Counter()
    sizes[None] = 0
    return max(among, key=lambda record: (sizes[record.get("behaviour")], record["log_p"])), len(draws)


@pytest.mark.slow
def test_the_page_of_evidence_follows_from_the_records():
    """Rows of rules over draws against greedy decoding and chains by exact McNemar tests, with a prompt read once."""
    page, runs, of_code = (FINDINGS / "evidence.md").read_text(), stored("evidence"), stored("cost_code")
    folders = dict(re.findall(r"^\| `([^`]+)` \| `([\w-]+)` \|$", page, re.MULTILINE))
    bases = {"HumanEval": [of_code[name] for name in ("greedy-humaneval-867ecf38922c", "power_mh-humaneval-f951c133089a",
                                                      "power_smc-humaneval-e86e68702885")],
             "MBPP": [runs[folders["greedy, MBPP"]]]}
    shares, tables = {}, dict(zip(("MBPP", "HumanEval"), re.findall(r"^\| (?:MBPP|HumanEval) \|.*\n\|.*\n((?:\|.*\n)+)", page,
                                                                   re.MULTILINE), strict=True))
    for benchmark, table in tables.items():
        others = [{problem: record["verdict"] == "correct" for problem, record in run.records.items()}
                  for run in bases[benchmark]]
        drawn = runs[folders[f"temperature 0.25, {benchmark}"]].draws
        assert len(others[0]) == {"HumanEval": 164, "MBPP": 123}[benchmark]
        for rule, number, right, *cells, forwards in (re.split(r" *\| *", line.strip("| ")) for line in table.splitlines()):
            rule, mine, costs = rule.strip("`"), {}, []
            if f"{rule}, {benchmark}" in folders:
                records = {problem: record for problem, record in runs[folders[f"{rule}, {benchmark}"]].records.items()
                           if problem in others[0]}
                mine = {problem: record["verdict"] == "correct" for problem, record in records.items()}
                costs = [record["token_forwards"] for record in records.values()]
            for problem in [] if mine else others[0]:
                draws = [drawn[problem][chain] for chain in range(int(number))]
                record, used = kept(draws, rule)
                mine[problem] = record["verdict"] == "correct"
                costs.append(draws[0]["prompt_forwards"]
                             + sum(each["token_forwards"] - each["prompt_forwards"] for each in draws[:used]))
            shares[benchmark, rule, int(number)] = mine
            assert (int(right), forwards) == (sum(mine.values()), f"{statistics.mean(costs):,.0f}")
            for other, (pair, p) in zip(others, zip(cells[::2], cells[1::2], strict=True), strict=True):
                if rule == "greedy":
                    continue
                won, lost = (sum(mine[each] == side and other[each] != side for each in other) for side in (True, False))
                assert (pair, float(p)) == (f"{won}, {lost}", pytest.approx(mcnemar(won, lost), rel=0.06))
    drawn = runs[folders["temperature 0.25, MBPP"]]
    order = sorted(drawn.draws, key=lambda problem: int(problem.partition("-")[2]))
    blocks = re.findall(r"^\| (\d+) to (\d+), `(\w+)`.* \| (\d+) \| (\d+) \| (\d+), (\d+) \| (\S+) \| ([\d,]+), ([\d,]+) \|$",
                        page, re.MULTILINE)
    assert len(blocks) == 6
    assert [name for _, last, name, *_ in blocks if int(last) == len(order)] == ["ps_examples"] * 2 + ["stop_at_max"]
    for first, last, name, *counts, p, of_draws, of_chains in blocks:
        problems, chains = order[int(first) - 1 : int(last)], runs[folders[f"{name}, MBPP"]]
        firsts, seconds = [], [chains.records[problem] for problem in problems]
        costs = []
        for problem in problems:
            draws = [drawn.draws[problem][chain] for chain in range(4)]
            record, used = kept(draws, "examples")
            firsts.append(record["verdict"] == "correct")
            costs.append(draws[0]["prompt_forwards"]
                         + sum(each["token_forwards"] - each["prompt_forwards"] for each in draws[:used]))
        others = [record["verdict"] == "correct" for record in seconds]
        won, lost = sum(map(operator.gt, firsts, others)), sum(map(operator.lt, firsts, others))
        assert [*map(int, counts)] == [sum(firsts), sum(others), won, lost]
        assert float(p) == pytest.approx(mcnemar(won, lost), rel=0.06)
        assert (of_draws, of_chains) == (f"{statistics.mean(costs):,.0f}",
                                         f"{statistics.mean(record['token_forwards'] for record in seconds):,.0f}")
    registered = re.findall(r"^\| `(\w+)` of (\d) over `(\w+)`.* \| (\d+), (\d+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    assert [name for _, _, name, *_ in registered] == ["greedy", "greedy", "log_p", "ps", "ps_examples", "smc"]
    for rank, (rule, number, name, won, lost, p, holm) in enumerate(registered):
        first, other = shares["MBPP", rule, int(number)], shares["MBPP", name, 4 if name == "log_p" else 1]
        assert (int(won), int(lost)) == (sum(first[each] > other[each] for each in other),
                                         sum(first[each] < other[each] for each in other))
        assert float(p) == pytest.approx(mcnemar(int(won), int(lost)), rel=0.06)
        assert float(holm) == pytest.approx((6 - rank) * mcnemar(int(won), int(lost)), rel=0.06)
