"""Labels name the fields that differ from the condition's own values."""

from __future__ import annotations

import pytest
from omegaconf import OmegaConf

from dflash_mcmc.config.identity import changes, label_of, labels_of, name_of_path, plain, with_fields


@pytest.mark.parametrize(("overrides", "label"), [
    (["condition=temp"], "temp"),
    (["condition=temp", "sampler.temperature=1.5"], "temp temperature=1.5"),
    (["condition=temp", "sampler.temperature=0.25"], "temp"),  # 1/alpha, given directly
    (["condition=ps", "sampler.alpha=2", "sampler.num_steps=10"], "ps alpha=2 num_steps=10"),
    (["condition=ps", "sampler.proposal_temperature=0.5"], "ps proposal_temperature=0.5"),
    (["condition=ps", "sampler.num_steps=10", "sampler.cut=horizon"], "ps cut=horizon num_steps=10"),
    (["condition=smc", "sampler.alpha=2"], "smc alpha=2"),  # its temperature only follows alpha
    (["condition=replica_exchange", "sampler.alphas=[1,2,3]"], "replica_exchange alphas=[1, 2, 3]"),
    (["condition=replica_exchange", "sampler.temperatures=[1,1,1]"], "replica_exchange temperatures=[1, 1, 1]"),
    (["condition=ps", "sampler.epsilon=0.1", "sampler.early_reject=off"], "ps"),  # neither changes an output
    (["condition=blend_ps", "blend.beta=-0.5", "blend.layers=[0,1]"], "blend_ps beta=-0.5 layers=[0, 1]"),
    (["condition=ps", "sampler.presence_penalty=1"], "ps presence_penalty=1"),
    (["experiment=power_sampling_paper", "condition=ps", "model=tiny", "hardware=local"], "ps"),  # its own number of steps
    (["experiment=power_sampling_paper", "condition=ps", "model=tiny", "hardware=local", "sampler.num_steps=2"],
     "ps num_steps=2"),
    (["sampler=temperature", "decoder=speculative_match", "draft=tiny", "decoder.draft_temperature=0.5"],
     "dflash_temperature_speculative_match draft_temperature=0.5"),
    (["probe=rejection_sampling"], "rejection_sampling"),
], ids=" ".join)
def test_a_label_names_what_differs(make_config, overrides, label):
    config = make_config(*overrides)
    assert label_of(config).replace(".0", "") == label
    on_disk = OmegaConf.to_container(OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create(plain(config)))))
    identity = {"sampler": "any"}
    assert labels_of([config.label()], [identity], [on_disk])[0].replace(".0", "") == label


def test_a_run_that_is_older_than_a_field_has_its_value_off(make_config):
    values = plain(make_config("condition=ps", "sampler.alpha=2"))
    del values["sampler"]["presence_penalty"], values["sampler"]["frequency_penalty"]
    assert changes(values) == {"sampler.alpha": 2.0}


def test_fields_that_vary_are_in_every_label_of_a_condition():
    labels = labels_of(["ps", "ps", "greedy"], [{"sampler.alpha": alpha} for alpha in (4.0, 2.0, 4.0)], [{}, {}, {}])
    assert labels == ["ps alpha=4", "ps alpha=2", "greedy"]


def test_fields_are_in_the_same_order_in_all_labels():
    """One field is a condition's own value in one run, and differs from it in the other."""
    def config(beta: float) -> dict:
        return {"blend": {"name": "layer", "layer": -3, "layers": None, "norm": "none", "beta": beta}}

    identities = [{"sampler.alpha": alpha, "blend.beta": beta} for alpha, beta in ((2.0, 0.1), (4.0, 0.05))]
    labels = labels_of(["blend_ps", "blend_ps"], identities, [config(0.1), config(0.05)])
    assert labels == ["blend_ps beta=0.1 alpha=2", "blend_ps beta=0.05 alpha=4"]


ONE, OTHER = "0123456789abcdef" * 2, "fedcba9876543210" * 2


@pytest.mark.parametrize(("paths", "shown"), [
    (("/data/smollm2", "/data/a/qwen3"), ["smollm2", "qwen3"]),
    (("Qwen/Qwen2.5-Math-7B-Instruct", "models/a/base/"), ["Qwen/Qwen2.5-Math-7B-Instruct", "base"]),
    (("/a/base", "/b/base"), ["base@01234567", "base@fedcba98"]),
    ((None, None), ["01234567", "fedcba98"])])
def test_models_are_named_by_their_folder_or_hub_name(paths, shown):
    identities = [{"model.content": content} for content in (ONE, OTHER)]
    labels = labels_of(["ps", "ps"], identities, [{"model": {"path": path}} for path in paths])
    assert labels == [f"ps model={name}" for name in shown]


def test_one_model_in_two_places_is_not_told_apart():
    configs = [{"model": {"path": path}} for path in ("/a/one", "/b/two")]
    assert labels_of(["ps", "ps"], [{"model.content": ONE}] * 2, configs) == ["ps", "ps"]


def test_a_folder_of_two_parts_is_no_hub_name(tmp_path, monkeypatch):
    (tmp_path / "models/base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert name_of_path("models/base") == "base"
    assert name_of_path("Qwen/Qwen3-4B") == "Qwen/Qwen3-4B"


@pytest.mark.parametrize(("path", "shown"), [("/data/gsm8k.jsonl", "ps dataset=gsm8k"),
                                             ("/data/hard.jsonl", "ps dataset=gsm8k path=hard.jsonl")])
def test_an_option_and_its_file_are_named_once(path, shown):
    assert with_fields("ps", {"dataset": "gsm8k", "dataset.path": path}) == shown
    assert with_fields("ps", {"dataset.path": path}) == f"ps dataset={path.rpartition('/')[2]}"
