"""The sections on sweeps, several chains, cost, strata and interaction, compared with numbers computed by hand."""

import dataclasses
import math
from pathlib import Path

import pytest

from dflash_mcmc.report import figure
from dflash_mcmc.report.parts import count, paragraphs, percent, points, probability
from dflash_mcmc.report.sections import chains, compared, configuration, overall, paired, swept
from dflash_mcmc.report.study import ProbeRun, study_of
from dflash_mcmc.sampler.power_mh import PowerMH
from dflash_mcmc.statistics.estimates import wilson
from tests.refusals import refused
from tests.report.folders import identity, record, study_over, write


def rows(section, name: str) -> list[dict]:
    found = next(table for table in section.tables if table.name == name)
    return list(found.rows if found.data is None else found.data)


def solved(number: int, of: int = 10, **rest) -> list[dict]:
    return [record(f"p{place}", "correct" if place < number else "wrong", **rest) for place in range(of)]


def test_formats_of_numbers():
    assert [count(value) for value in (1234, 8.25, 7.0, None)] == ["1,234", "8.25", "7", "-"]
    assert percent(0.7115, 0.618, 0.79) == "71.2 % [61.8, 79.0]"
    assert points(-0.0288) == "-2.9"
    assert [probability(value) for value in (0.0703125, 0.0001, 1.0, None)] == ["0.070", "<0.001", "1.000", "-"]
    assert paragraphs("\na\nb\n\nc\n") == ["a b", "c"]


class TestSwept:
    def test_a_grid_is_a_map_of_accuracies_and_nothing_is_averaged_over(self, tmp_path):
        """alpha by beta, with the proposal's temperature at 1/alpha; runs with a second dtype form their own map."""
        accuracies = {(2.0, 0.01): 3, (2.0, 0.1): 4, (4.0, 0.01): 5, (4.0, 0.1): 9}
        for dtype, less in (("bfloat16", 0), ("float32", 1)):
            for (alpha, beta), correct in accuracies.items():
                made = identity("blend_ps", sampler__alpha=alpha, sampler__proposal_temperature=1.0 / alpha, blend__beta=beta,
                                model__dtype=dtype)
                write(tmp_path / "demo", "blend_ps", solved(correct - less), made)
        section = swept.section(study_over(tmp_path))
        for table, less in (("heatmap_alpha_beta", 0), ("heatmap_alpha_beta_2", 1)):
            found = {(row["alpha"], row["beta"]): row for row in rows(section, table)}
            assert {point: row["accuracy"] for point, row in found.items()} == {
                point: (correct - less) / 10 for point, correct in accuracies.items()}
            assert all((row["accuracy_low"], row["accuracy_high"]) == wilson(round(10 * row["accuracy"]), 10)[1:3]
                       for row in found.values())
            assert all(row["n"] == 10 for row in found.values())
        assert [drawing.name for drawing in section.drawings] == ["fig_heatmap_alpha_beta", "fig_heatmap_alpha_beta_2"]
        axes, bar = section.drawings[0].make().axes
        assert [text.get_text().partition("\n")[0] for text in axes.texts] == ["30.0", "40.0", "50.0", "90.0"]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["2", "4"]
        assert bar.get_ylabel() == "correct answers, %"

    def test_one_axis_is_a_curve_and_seeds_are_pooled(self, tmp_path):
        for steps, correct in ((0, (2, 4)), (2, (6, 6))):
            for seed, number in enumerate(correct):
                write(tmp_path / "demo", "ps", solved(number), identity("ps", sampler__num_steps=steps, seed=seed))
        section = swept.section(study_over(tmp_path))
        assert [(row["num_steps"], row["accuracy"], row["n"], row["runs"]) for row in rows(section, "sweep_num_steps")] == [
            (0, 0.3, 20, 2), (2, 0.6, 20, 2)]
        assert [drawing.name for drawing in section.drawings] == ["fig_sweep_num_steps"]


class TestGuided:
    """Greedy decoding solves 20 of 40 problems; a layer helps at beta 0.1, hurts at -0.1, and its rotation does nothing."""

    @pytest.fixture
    def study(self, tmp_path):
        def answered(correct: int, text: str) -> list[dict]:
            return solved(correct, 40, text=text)

        write(tmp_path / "demo", "greedy", answered(20, "abcd"))
        for beta, correct, text, rest in ((0.1, 32, "abxx", {}), (-0.1, 8, "axxd", {}), (0.2, 20, "abcd", {}),
                                          (0.1, 20, "abcdefgh", {"blend__direction": "random"})):
            made = identity("blend_greedy", blend__beta=beta, **rest)
            write(tmp_path / "demo", "blend_greedy", answered(correct, text), made)
        write(tmp_path / "demo", "blend_ps", answered(40, "x"), identity("blend_ps"))  # has no run of the model alone
        return study_over(tmp_path)

    def test_the_gain_of_each_point_and_the_best_beta(self, study):
        section = swept.guided_section(study)
        found = {(row["source"], row["beta"]): row for row in rows(section, "guided")}
        assert {key: row["gain"] for key, row in found.items()} == pytest.approx({
            ("layer", -0.1): -0.3, ("layer", 0.1): 0.3, ("layer", 0.2): 0.0, ("layer direction=random", 0.1): 0.0})
        assert {key: row["agreement"] for key, row in found.items()} == {
            ("layer", -0.1): 0.25, ("layer", 0.1): 0.5, ("layer", 0.2): 1.0, ("layer direction=random", 0.1): 0.5}
        assert {row["sampler"] for row in found.values()} == {"greedy"}
        for row in found.values():
            assert row["gain_low"] < row["gain"] < row["gain_high"]
            assert row["problems"] == 40
        # 12 problems differ, all to one side: 2 / 2**12, times the three betas of the curve, of which two are equal
        assert found["layer", 0.1]["p"] == pytest.approx(3 * 2 / 2**12)
        best = {row["source"]: row for row in rows(section, "guided_best")}
        assert (best["layer"]["beta"], best["layer"]["resolved"]) == (0.1, "yes")
        other = best["layer direction=random"]
        assert (other["resolved"], other["p"]) == ("no", 1.0)

    def test_the_trend_is_the_slope_over_all_betas(self, study):
        best = {row["source"]: row for row in rows(swept.guided_section(study), "guided_best")}
        # accuracies 0.2, 0.5, 0.8, 0.5 at -0.1, 0, 0.1, 0.2: (-0.15 * 0.2 - 0.05 * 0.5 + 0.05 * 0.8 + 0.15 * 0.5) / 0.05 = 1.2
        assert best["layer"]["trend"] == pytest.approx(0.12)
        assert best["layer"]["trend_low"] < 0.12 < best["layer"]["trend_high"] < 0.2
        assert best["layer"]["p_trend"] < 0.01
        other = best["layer direction=random"]
        assert (other["trend"], other["p_trend"], other["problems"]) == (0.0, 1.0, 40)
        (gain,) = (row for row in rows(swept.guided_section(study), "guided") if row["source"] == "layer direction=random")
        assert (other["trend_low"], other["trend_high"]) == pytest.approx((gain["gain_low"], gain["gain_high"]))
        assert other["trend_low"] < 0 < other["trend_high"]

    def test_a_beta_without_common_problems_is_no_part_of_the_trend(self, study, tmp_path):
        made = identity("blend_greedy", blend__beta=0.4)
        others = [{**record, "problem": f"other-{record['problem']}"} for record in solved(3)]
        write(tmp_path / "demo", "blend_greedy", others, made)
        best = {row["source"]: row for row in rows(swept.guided_section(study_over(tmp_path)), "guided_best")}
        assert (best["layer"]["betas"], best["layer"]["problems"]) == (3, 40)
        assert best["layer"]["trend"] == pytest.approx(0.12)

    def test_figures_have_a_line_for_each_source_and_fill_what_is_resolved(self, study):
        over_beta, over_agreement = (drawing.make() for drawing in swept.guided_section(study).drawings)
        (axes,) = over_beta.axes
        filled = [tuple(line.get_xydata()[0]) for line in axes.lines if line.get_markerfacecolor() not in ("white", "None")
                  and line.get_marker() == "o"]
        assert [(x, round(y)) for x, y in filled] == [(-0.1, -30), (0.1, 30)]
        assert all([0.0, 0.0] in line.get_xydata().tolist() for line in axes.lines[1:] if len(line.get_xydata()) > 1
                   and line.get_linestyle() == "-")
        assert [text.get_text() for text in over_agreement.axes[0].texts] == ["-0.1", "0.1", "0.2", "0.1"]

    @pytest.fixture
    def probe(self):
        """A probe of the target that the study has, which has read one source beside layer 32."""
        def probe(source: str = "layer", **changes) -> ProbeRun:
            own = {**identity("blend_greedy"), "probe": "p", "probe.norm": None, **changes}
            row = {"source": source, "layer": 33 if source == "layer" else None, "n": 7}
            for place, name in enumerate(("kl", "rank_correlation")):
                row |= {name: 0.5 + place, f"{name}_low": 0.25, f"{name}_high": 1.75}
            return ProbeRun(Path("probed"), own, {"tables": {"agreement": [{**row, "layer": 32}, row]}})

        return probe

    def test_a_probe_of_the_same_target_gives_the_agreement_of_its_sources(self, study, probe):
        """Only the layer itself: the turned layer, another norm, and a probe of another model have no KL."""
        for probes, known in (((probe(),), True), ((), False), ((probe(**{"model.content": "z"}),), False),
                              ((probe(**{"dataset.content": "z"}),), False)):
            section = swept.guided_section(study._replace(probes=probes))
            found = {(row["source"], row["beta"]): (row["kl"], row["rank_correlation"]) for row in rows(section, "guided")}
            own = (0.5, 1.5) if known else (None, None)
            assert found == {("layer", -0.1): own, ("layer", 0.1): own, ("layer", 0.2): own,
                             ("layer direction=random", 0.1): (None, None)}
            drawing = section.drawings[1]
            assert ("KL" in drawing.title, "shared beginning" in drawing.title) == (known, not known)
            assert ("probed" in " ".join(section.text)) is known
            (axes,) = drawing.make().axes
            assert axes.get_xlabel().startswith("KL") is known
            assert len(axes.texts) == (3 if known else 4)
        normed = dataclasses.replace(study.runs[1], identity={**study.runs[1].identity, "blend.norm": "final"})
        assert swept._probed(normed, [probe()]) is None
        assert swept._probed(normed, [probe(**{"probe.norm": "final"})])["kl"] == 0.5

    def test_a_probe_of_the_same_blend_gives_its_agreement_at_every_beta(self, study, probe):
        turned = {"blend.direction": "random", "blend.beta": -0.3}
        section = swept.guided_section(study._replace(probes=(probe("blend", **turned),)))
        assert {row["source"] for row in rows(section, "guided") if row["kl"] is not None} == {"layer direction=random"}

    def test_a_single_point_is_no_section(self, tmp_path):
        for condition in ("greedy", "blend_greedy"):
            write(tmp_path / "demo", condition, solved(5))
        assert swept.guided_section(study_over(tmp_path)) is None


class TestSeveralChains:
    @pytest.fixture
    def study(self, tmp_path):
        """Three problems with three chains: all right; two of three right; three different answers."""
        answers = {"a": ("42", "42", "42"), "b": ("42", "41", "42"), "c": ("42", "41", "40")}
        write(tmp_path / "demo", "temp", [
            record(problem, "correct" if answer == "42" else "wrong", chain, answer=answer, token_forwards=100, log_p=-chain)
            for problem, given in answers.items() for chain, answer in enumerate(given)], num_chains=3)
        return study_over(tmp_path)

    def test_votes_have_rows_of_their_own_at_the_cost_of_all_chains(self, study):
        found = {row["run"]: row for row in overall.section(study).tables[0].rows}
        assert list(found) == ["temp", "temp, majority of 3", "temp, best by log p of 3"]
        assert (found["temp"]["correct"], found["temp"]["num_samples"]) == (6, 9)
        vote = found["temp, majority of 3"]
        assert vote["correct"] == pytest.approx(2 + 1 / 3)  # the last problem is a tie of three answers
        assert (vote["num_samples"], vote["token_forwards"]) == (3, 900)
        assert found["temp, best by log p of 3"]["correct"] == 3  # chain 0 has the largest log p and is right
        assert overall.section(study).tables[0].cells()[1][1] == "2.33"
        assert "some intervals are a bootstrap over 3 problems" in " ".join(overall.section(study).text)
        costs = {row["run"]: row["token_forwards"] for row in overall.cost_section(study).tables[0].rows}
        assert (costs["temp"], costs["temp, majority of 3"]) == (100, 300)  # a vote costs what its chains cost

    def test_votes_have_the_cost_of_other_runs(self, study, tmp_path):
        """Power sampling costs 250 token-forwards, so two draws of 100 may vote."""
        write(tmp_path / "demo", "ps", [record(problem, "correct" if problem == "a" else "wrong", token_forwards=250,
                                               share_seconds=4.0) for problem in "abc"])
        found = study_over(tmp_path)
        voted = [entry.shown for entry in found.entries if entry.by == "majority"]
        assert voted == ["temp, majority of 2", "temp, majority of 3"]
        tables = {table.name: table.rows for table in chains.matched_section(found).tables}
        (row,) = tables["matched_token_forwards"]
        assert (row["run"], row["votes_of"], row["k"], row["vote_cost"], row["cost"]) == ("ps", "temp", 2, 200.0, 250.0)
        assert row["vote_accuracy"] == pytest.approx((1.0 + 2 / 3 + 1 / 3) / 3)  # two different answers tie
        assert row["difference"] == pytest.approx(1 / 3 - row["vote_accuracy"])
        assert tables["matched_share_seconds"][0]["k"] == 1  # a draw takes 8 device seconds
        assert chains.matched_section(study) is None  # no run to compare the votes with

    def test_every_rule_is_compared_with_the_majority_vote(self, study):
        """Chain 0 of each problem is right and the likeliest; log q is equal, so it has most of the weight for p^4."""
        section = chains.rules_section(study)
        found = {row["rule"]: row for row in rows(section, "vote_rules")}
        assert list(found) == ["majority vote", "power vote (alpha 4)", "adaptive vote (confidence 0.95)"]
        adaptive = found["adaptive vote (confidence 0.95)"]  # three votes never end it early: P = 0.94
        assert (adaptive["accuracy"], adaptive["effective"]) == (pytest.approx(found["majority vote"]["accuracy"]), 3.0)
        assert found["majority vote"]["accuracy"] == pytest.approx((2 + 1 / 3) / 3)
        power = found["power vote (alpha 4)"]
        assert (power["accuracy"], power["k"], power["problems"], power["dominated"]) == (1.0, 3, 3, 1.0)
        assert power["difference"] == pytest.approx(2 / 9)
        assert power["effective"] == pytest.approx(sum(weights := [1.0, math.exp(-4), math.exp(-8)]) ** 2
                                                   / sum(weight**2 for weight in weights))
        assert {row["verdict"] for row in found.values()} == {"-", "not resolved"}
        curves = {(row["rule"], row["k"]): row["accuracy"] for row in rows(section, "vote_curves")}
        one = (1 + 2 / 3 + 1 / 3) / 3
        assert [curves[rule, 1] for rule in found] == pytest.approx([one, one, 1.0])  # an adaptive vote takes chain 0
        assert curves["power vote (alpha 4)", 2] == pytest.approx((1 + 2 / 3 + 2 / 3) / 3)  # the likelier chain
        (axes,) = section.drawings[0].make().axes
        assert [line.get_label() for line in axes.containers] == list(found)
        assert "These runs have none" not in " ".join(section.text)

    def test_exponents_and_parameters_come_from_the_command_or_the_run(self, study, tmp_path):
        several = study_of(study.runs, alphas=[1.0, 2.0, 2.0])
        names = [row["rule"] for row in rows(chains.rules_section(several), "vote_rules")]
        assert names[:3] == ["majority vote", "power vote (alpha 1)", "power vote (alpha 2)"]
        with refused("given 2 0; allowed: numbers > 0", start="--alpha"):
            study_of(study.runs, alphas=[2.0, 0.0])
        vote = {"power": {"alpha": 3.0}, "adaptive": {"confidence": 0.8}}
        write(tmp_path / "other", "temp", [record("a", chain=chain) for chain in range(2)], num_chains=2,
              config={"vote": vote, "aggregate": ["adaptive", "power"]})
        own = study_over(tmp_path / "other")
        assert [row["rule"] for row in rows(chains.rules_section(own), "vote_rules")][1:] == [
            "power vote (alpha 3)", "adaptive vote (confidence 0.8)"]
        assert [entry.shown for entry in own.entries] == [
            "temp", "temp, majority of 2", "temp, power vote (alpha 3) of 2", "temp, adaptive vote (confidence 0.8) of 2",
            "temp, best by log p of 2"]

    def test_runs_without_importance_weights_are_named(self, tmp_path):
        write(tmp_path / "demo", "ps", [record("a", chain=chain, proposals=4) for chain in range(2)], num_chains=2)
        write(tmp_path / "demo", "temp", [record("a", chain=chain) for chain in range(2)], num_chains=2,
              config={"sampler": {"name": "temperature", "alpha": 4.0, "top_p": 0.9}, "aggregate": "majority"})
        found = study_over(tmp_path)
        section = chains.rules_section(found)
        assert [(row["run"], row["rule"]) for row in rows(section, "vote_rules")] == [
            (run, rule) for run in ("ps", "temp top_p=0.9") for rule in (
                "majority vote", "adaptive vote (confidence 0.95)")]
        assert "no power vote: ps; temp top_p=0.9." in section.text[-1]
        write(tmp_path / "single", "greedy", [record("a")])
        assert chains.rules_section(study_over(tmp_path / "single")) is None

    def test_weighted_votes_that_a_run_asks_for_are_compared_at_equal_cost(self, tmp_path):
        write(tmp_path / "demo", "temp", [
            record("a", "wrong" if chain else "correct", chain, answer=str(chain), token_forwards=100, log_p=-float(chain))
            for chain in range(3)], num_chains=3, config={"aggregate": "power"})
        write(tmp_path / "demo", "ps", [record("a", "wrong", token_forwards=250)])
        tables = {table.name: table.rows for table in chains.matched_section(study_over(tmp_path)).tables}
        found = {row["vote"]: row for row in tables["matched_token_forwards"]}
        assert list(found) == ["majority vote", "power vote (alpha 4)"]
        assert [row["k"] for row in found.values()] == [2, 2]
        assert [row["vote_accuracy"] for row in found.values()] == pytest.approx([1 / 3, 2 / 3])

    def test_votes_omit_problems_with_fewer_chains(self, tmp_path):
        write(tmp_path / "demo", "temp", [record("a", "correct", chain) for chain in range(3)] + [record("b", "wrong")],
              num_chains=3)
        found = study_over(tmp_path)
        votes = {entry.shown: len(entry.records) for entry in found.entries if entry.voted}
        assert set(votes.values()) == {1}
        expected = "votes omit problems that have fewer chains than others: 1 of 2 problems of temp"
        assert any(expected in warning for warning in found.warnings)

    @pytest.mark.parametrize("grader", ["code", "judge"])
    def test_programs_and_judged_texts_are_not_voted_on(self, tmp_path, grader):
        write(tmp_path / "demo", "temp", [record("a", "correct", chain) for chain in range(3)],
              identity("temp", grader=grader), num_chains=3)
        found = study_over(tmp_path)
        assert [entry.by for entry in found.entries] == ["sample", "log_p"]
        section = chains.section(found)
        assert [(row["pass_at_k"], row["majority_at_k"]) for row in rows(section, "votes")] == [(1.0, None)] * 3
        assert len(section.drawings[0].make().axes) == 2

    def test_curves_over_the_number_of_chains(self, study):
        found = rows(chains.section(study), "votes")
        assert [row["k"] for row in found] == [1, 2, 3]
        assert [row["pass_at_k"] for row in found] == pytest.approx([(1 + 2 / 3 + 1 / 3) / 3, (1 + 1 + 2 / 3) / 3, 1.0])
        assert found[-1]["majority_at_k"] == pytest.approx((2 + 1 / 3) / 3)
        assert "1 of 3 problems of temp" in chains.section(study).text[-1]

    def test_comparisons_count_problems_not_samples(self, study, tmp_path):
        write(tmp_path / "demo", "greedy", [record(problem, "wrong") for problem in "abc"])
        found = {row["run"]: row for row in paired.section(study_over(tmp_path)).tables[0].rows}
        assert found["temp"]["difference"] == pytest.approx((1 + 2 / 3 + 1 / 3) / 3)
        assert {row["test"] for row in found.values()} == {"paired permutation", "exact McNemar"}
        assert found["temp"]["test"] == "paired permutation"
        assert all(row["problems"] == 3 for row in found.values())


def test_holm_over_the_rows_of_the_table(tmp_path):
    """Three runs compared with the baseline gain 12, 9 and 5 of 20 problems and lose none."""
    for name, number in (("greedy", 5), ("temp", 17), ("ps", 14), ("blend_greedy", 10)):
        write(tmp_path / "demo", name, solved(number, 20))
    study = study_over(tmp_path)
    section = paired.section(study)
    found = {row["run"]: row for row in section.tables[0].rows}
    alone = {"temp": 2 * 0.5**12, "ps": 2 * 0.5**9, "blend_greedy": 2 * 0.5**5}
    assert {name: row["p_value"] for name, row in found.items()} == pytest.approx(alone)
    assert {name: row["p_holm"] for name, row in found.items()} == pytest.approx(
        {"temp": 3 * alone["temp"], "ps": 2 * alone["ps"], "blend_greedy": alone["blend_greedy"]})
    assert {name: row["verdict"] for name, row in found.items()} == {
        "temp": "better", "ps": "better", "blend_greedy": "not resolved"}
    resolved, open_ = paired.verdict_of(study, [section])
    assert resolved.startswith("Compared with greedy, 2 of 3 differences are resolved: ")
    assert open_.startswith("The largest that is not resolved is blend_greedy ")
    assert "problems, or 2 chains a problem, would resolve one of this size" in open_


def test_a_run_that_loses_is_called_worse(tmp_path):
    write(tmp_path / "demo", "greedy", solved(18, 20))
    write(tmp_path / "demo", "ps", solved(2, 20))
    (row,) = paired.section(study_over(tmp_path)).tables[0].rows
    assert (row["verdict"], row["only_run"], row["only_baseline"]) == ("worse", 0, 16)


def test_pareto_front_at_equal_cost_and_at_equal_accuracy(tmp_path):
    """Runs that are cheap and poor, expensive and good, expensive and poor; one at the good one's cost but less accurate."""
    for seed, (correct, price) in enumerate(((3, 100), (8, 500), (3, 500), (7, 500), (8, 900))):
        write(tmp_path / "demo", "ps", solved(correct, token_forwards=price), identity("ps", seed=seed))
    write(tmp_path / "demo", "ps", solved(1, 1), identity("ps", seed=5), limit=10, finished=False)  # stopped after a success
    front = {row["run"]: row["front_token_forwards"] for row in overall.cost_section(study_over(tmp_path)).tables[0].rows}
    assert list(front.values()) == ["yes", "yes", "no", "no", "no", "not complete"]


def test_strata_use_the_problems_of_the_greedy_run(tmp_path):
    write(tmp_path / "demo", "greedy", [record(f"p{n}", "correct" if n < 4 else "wrong", level=n % 2) for n in range(6)])
    write(tmp_path / "demo", "ps", [record(f"p{n}", "correct" if n > 2 else "wrong", level=n % 2) for n in range(8)])
    section = paired.strata_section(study_over(tmp_path))
    found = {(row["run"], row["stratum"]): (row["correct"], row["n"]) for row in rows(section, "difficulty")}
    assert found["ps", "easy (greedy right)"] == (1, 4)  # p3
    assert found["ps", "hard (greedy wrong)"] == (2, 2)  # p4 and p5; the greedy run has no p6 and p7
    levels = {(row["run"], row["stratum"]): (row["correct"], row["n"]) for row in rows(section, "levels")}
    assert levels["ps", "0"] == (2, 4)
    assert "subjects" not in {table.name for table in section.tables}  # all problems have one subject


def test_interaction_uses_runs_that_differ_only_in_blend_and_sampler(tmp_path):
    for name in ("greedy", "blend_greedy", "ps", "blend_ps"):  # the seed of greedy decoding is no difference
        write(tmp_path / "demo", name, solved(5), identity(name, seed=int(name.endswith("ps"))))
    for beta in (0.1, 0.2):  # no greedy run has this beta
        write(tmp_path / "demo", "blend_ps", solved(9), identity("blend_ps", blend__beta=beta, seed=1))
    write(tmp_path / "demo", "blend_ps", solved(9), identity("blend_ps", sampler__num_steps=10, seed=1))  # no ps run has it
    (row,) = compared.interaction_section(study_over(tmp_path)).tables[0].rows
    assert (row["both_on"], row["interaction"]) == ("blend_ps beta=0.05 num_steps=2", 0.0)


def test_null_is_a_value_where_a_field_takes_it(tmp_path):
    """The second prompt null is the prompt's last token, and the draft of blend=draft is a part of the target."""
    for settings in ({"prompt": None}, {"prompt": "{question}"}):
        write(tmp_path / "demo", "ps", solved(5), identity("ps", blend="prompt", blend__beta=0.1,
                                                           **{f"blend__{name}": value for name, value in settings.items()}))
    for draft in ("first", "second"):
        write(tmp_path / "demo", "ps", solved(5), identity("ps", blend="draft", blend__beta=0.1, draft="dflash",
                                                           draft__content=draft))
    study = study_over(tmp_path)
    assert len(study.runs) == 4
    assert chains.agreement_section(study) is None


def test_the_front_is_of_the_runs_with_the_most_answers(tmp_path):
    """Votes over five problems are many rows, and of fewer answers than two runs over forty."""
    write(tmp_path / "demo", "greedy", solved(10, 40, token_forwards=100))
    write(tmp_path / "demo", "ps", solved(20, 40, token_forwards=900))
    draws = [record(f"p{number:02d}", "correct", chain, answer="1", token_forwards=50) for number in range(5)
             for chain in range(8)]
    write(tmp_path / "demo", "temp", draws)
    section = overall.cost_section(study_over(tmp_path))
    fronts = {row["run"]: row["front_token_forwards"] for row in section.tables[0].rows}
    assert [name for name, is_best in fronts.items() if is_best == "yes"] == ["greedy", "ps"]
    assert len(fronts) > 4
    assert fronts.popitem()[1] == "other problems"


def test_runs_are_matched_to_published_methods(tmp_path):
    """Temperature 1 is the base and no low temperature; power samplers of different settings are not compared."""
    write(tmp_path / "demo", "greedy", solved(5))
    write(tmp_path / "demo", "temp", solved(5), identity("temp", sampler__temperature=1.0))
    write(tmp_path / "demo", "ps", solved(6))
    write(tmp_path / "demo", "draft_blend_ps", solved(9), identity("draft_blend_ps", sampler__alpha=8.0))
    section = compared.section(study_over(tmp_path))
    own = {row["method"] for row in rows(section, "published") if row["model"] == "these runs"}
    assert own == {"base (temperature 1)", "greedy", "power sampling"}
    assert "blend_sources" not in {table.name for table in section.tables}
    write(tmp_path / "other", "greedy", solved(5), identity("greedy", model__content="e" * 32))  # of another model
    write(tmp_path / "other", "ps", solved(6))
    assert compared.section(study_over(tmp_path / "other")) is None
    write(tmp_path / "demo", "blend_ps", solved(9))
    section = compared.section(study_over(tmp_path))
    assert {row["method"] for row in rows(section, "published") if row["model"] == "these runs"} == {
        "base (temperature 1)", "greedy", "power sampling", "blend, power sampling"}


def test_rates_are_shares_of_proposals(tmp_path):
    write(tmp_path / "demo", "ps", [record("a", proposals=8, accepted=6, moved=2, abandoned=1, tokens_drawn=100,
                                            tokens_skipped=25),
                                     record("b", proposals=2, accepted=1, moved=1, abandoned=0, tokens_drawn=100,
                                            tokens_skipped=25)])
    write(tmp_path / "demo", "greedy", solved(5))
    (row,) = rows(chains.section(study_over(tmp_path)), "chains")
    assert {name: row[name] for name in ("accepted", "moved", "identical", "abandoned", "skipped")} == {
        "accepted": 0.7, "moved": 0.3, "identical": 0.4, "abandoned": 0.1, "skipped": 0.2}


def test_sections_without_data_are_left_out(tmp_path):
    write(tmp_path / "demo", "greedy", solved(5))
    study = study_over(tmp_path)
    sections = (paired.section, compared.interaction_section, swept.section, chains.section, compared.section,
                configuration.setting_section, chains.agreement_section)
    assert [section(study) for section in sections] == [None] * 7


@pytest.mark.parametrize(("name", "expected"), [
    ("ps", {"target model", "Metropolis-Hastings", "proposal: a redrawn suffix", "1/α = 0.25", "16 blocks"}),
    ("blend_ps", {"β = 0.05", "layer 33", "(1 - β) target + β other"}), ("draft_blend_ps", {"draft\nblock by block"}),
])
def test_the_diagram_has_the_values_of_the_run(tmp_path, name, expected):
    write(tmp_path / "demo", name, solved(5, proposals=4, accepted=2, moved=1))
    (drawing,) = configuration.setting_section(study_over(tmp_path)).drawings
    with figure.style():
        text = "\n".join(part.get_text() for part in drawing.make().axes[0].texts)
    assert all(part in text for part in expected)


class TestAgreement:
    def test_runs_of_one_power_are_compared_and_others_are_not(self, tmp_path):
        values = [-1.0, -1.2, -0.9, -1.1]
        fields = dataclasses.asdict(PowerMH())
        for name, changed, less in (("ps", {}, 0.0), ("far", {"num_steps": 1}, 9.0), ("other", {"alpha": 2.0}, 9.0)):
            made = identity("ps", **{f"sampler__{key}": value for key, value in changed.items()})
            records = [record(f"p{place}", chain=chain, log_p=value - less) for place in range(5)
                       for chain, value in enumerate(values)]
            write(tmp_path / name, "ps", records, made, config={"sampler": {"name": "power_mh", **fields, **changed}})
        write(tmp_path / "greedy", "greedy", solved(5, 5))
        study = study_over(tmp_path)
        found = rows(chains.agreement_section(study), "agreement")
        assert [(row["number"], row["problems"], row["samples_a"], row["verdict"]) for row in found] == [
            ("log p", 5, 20, "differ"), ("tokens", 5, 20, "agree")]
        assert abs(found[0]["difference"]) == pytest.approx(9.0)


def test_the_parts_of_the_time_are_means_over_samples_and_votes_have_none(tmp_path):
    timed = [record(problem, chain=chain, prefill_seconds=1.0 + chain, share_seconds=8.0, grade_seconds=0.5, ended=chain == 1)
             for problem in "ab" for chain in range(2)]
    write(tmp_path / "demo", "temp", timed, num_chains=2)
    study = study_over(tmp_path)
    of_samples, *votes = rows(overall.cost_section(study), "cost")
    assert [of_samples[f"{part}_seconds"] for part in ("prefill", "draw", "grade")] == [1.5, 6.5, 0.5]
    assert [vote["draw_seconds"] for vote in votes] == [None, None]
    found = overall.section(study)
    assert [(row["run"], row["finish_reason/length"], row["finish_reason/stop_id"]) for row in rows(found, "ends")] == [
        ("temp", 2, 2)]  # a vote has no end of its own
    assert [text for text in found.text if "cut off" in text] == ["temp: 2 of 4 answers were cut off at "
                                                                  "dataset.max_new_tokens=1024."]


def test_a_line_of_cost_is_a_method_over_its_budgets(tmp_path):
    """Steps are a budget and alpha is none; a run that is not complete is a cross beside its line."""
    for steps, alpha, finished in ((1, 2.0, True), (2, 2.0, True), (1, 4.0, True), (2, 4.0, False)):
        made = identity("ps", sampler__num_steps=steps, sampler__alpha=alpha)
        write(tmp_path / "demo", "ps", solved(5 + steps, token_forwards=100 * steps), made, finished=finished,
              limit=12 - 2 * finished)
    axes, right = overall.cost_section(study_over(tmp_path)).drawings[0].make().axes
    lines = [line for line in axes.lines if line.get_marker() not in ("None", "x") and len(line.get_xdata())]
    assert [line.get_xdata().tolist() for line in lines] == [[100, 200], [100]]
    crosses = [line.get_xdata().tolist() for line in axes.lines if line.get_marker() == "x" and len(line.get_xdata())]
    assert crosses == [[200]]
    assert sorted(text.get_text().partition(" proposal")[0] for text in right.texts) == ["ps alpha=2", "ps alpha=4"]


def test_published_rows_stand_beside_runs_on_their_dataset_alone(tmp_path):
    for condition in ("greedy", "ps"):
        write(tmp_path / "demo", condition, solved(5), identity(condition, dataset="gsm8k"))
    section = compared.section(study_over(tmp_path))
    assert [table.name for table in section.tables] == ["improvements"]
    assert [*section.tables[0].columns] == ["improvement", "these runs"]
    assert not section.drawings
