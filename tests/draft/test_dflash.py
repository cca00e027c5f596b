"""`draft=dflash`: runs with a checkpoint folder, and errors for bad checkpoints."""

import json
import shutil
from pathlib import Path

import pytest

from dflash_mcmc.config.identity import identity_hash
from dflash_mcmc.errors import UserError
from tests.runs import execute

RUN = ("decoder=speculative_match", "sampler=greedy", "dataset.limit=2", "dataset.max_new_tokens=32")


@pytest.fixture
def checkpoint(tmp_path, make_config) -> Path:
    """A copy of the embedded draft, which tests can change."""
    config = make_config(*RUN, "draft=tiny")
    return Path(shutil.copytree(config.draft.path, tmp_path / "draft"))


def change(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.update(values)
    (folder / "config.json").write_text(json.dumps(config))


def refused(make_config, folder: Path, message: str, *overrides: str) -> None:
    with pytest.raises(UserError) as error:
        execute(make_config(*RUN, "draft=dflash", f"draft.path={folder}", *overrides))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_is_known_by_its_content_and_not_by_its_path(make_config, checkpoint):
    moved = make_config(*RUN, "draft=dflash", f"draft.path={checkpoint}", "draft.dtype=float32")
    assert identity_hash(moved) == identity_hash(make_config(*RUN, "draft=tiny"))


def test_a_draft_for_another_target_is_refused(make_config, checkpoint):
    change(checkpoint, num_target_layers=36)
    refused(make_config, checkpoint, "draft.path: the draft was trained for a target of 36 layers; allowed: 8, the target's")


def test_a_block_size_above_the_trained_one_is_refused(make_config, checkpoint):
    size = json.loads((checkpoint / "config.json").read_text())["block_size"]
    refused(make_config, checkpoint, f"draft.block_size: given {size + 1}; allowed: 2 to {size}",
            f"draft.block_size={size + 1}")
