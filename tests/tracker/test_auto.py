"""`tracker=auto`, the default: W&B with an account, else Trackio, else none."""

import importlib.util

import pytest

from dflash_mcmc.components import name_of
from dflash_mcmc.errors import UserError
from dflash_mcmc.tracker import auto


@pytest.mark.parametrize(("variables", "netrc", "installed", "chosen"), [
    ({}, "", True, "trackio"), ({}, "", False, "none"), ({"WANDB_API_KEY": "f" * 40}, "", True, "wandb"),
    ({"WANDB_MODE": "offline"}, "", True, "wandb"), ({"WANDB_MODE": "disabled"}, "", True, "none"),
    ({}, "machine api.wandb.ai login user password secret", True, "wandb"),
    ({}, "machine other.example login user password secret", True, "trackio"), ({}, "machine", True, "trackio"),
    ({}, "default login user password secret", True, "trackio"),
    ({}, "machine wandb.firm login user password secret", True, "wandb")])
def test_what_a_run_without_a_tracker_takes(make_config, monkeypatch, tmp_path, capsys, variables, netrc, installed, chosen):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SWEEP_ID", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "netrc").write_text(netrc)
    if "wandb.firm" in netrc:  # what `wandb login --host` writes
        (tmp_path / "settings").write_text("[default]\nbase_url = https://wandb.firm\n")
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: (
        None if name == "trackio" and not installed else find(name, *rest)))
    auto._tell.cache_clear()
    assert name_of(make_config("tracker=auto", "tracker.project=mine").tracker) == chosen
    assert ("pip install trackio" in capsys.readouterr().err) == (not installed)
    if not installed:
        with pytest.raises(UserError, match=r"tracker=trackio: the package trackio is not installed: pip install trackio"):
            make_config("tracker=trackio")
