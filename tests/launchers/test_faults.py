"""Many random faults in the same sweeps: no record is lost, repeated or corrupted, and all messages are readable."""

import subprocess

import pytest

from tests.launchers import faults
from tests.launchers.faults import Campaign


@pytest.fixture
def campaign(tmp_path, request):
    try:
        (tmp_path / "try").mkdir()
        with faults.small_disk(tmp_path / "try"):
            pass
    except subprocess.CalledProcessError as error:
        pytest.skip(f"cannot mount a disk of its own, which some faults need: {error.stderr.decode().strip()}")
    made = Campaign(seed=request.config.getoption("--faults-seed"))
    faults.undisturbed(made, tmp_path / "undisturbed")
    return made


@pytest.mark.slow
def test_150_faults(campaign, tmp_path, capsys):
    for number in range(25):
        faults.disturb(campaign, tmp_path / f"sweep-{number}", faults=6)
        with capsys.disabled():
            print(f"\n{campaign.injected.total()} faults: {dict(campaign.injected)}; wrong: {len(campaign.wrong)}", flush=True)
    assert not campaign.wrong, "\n".join(campaign.wrong)
