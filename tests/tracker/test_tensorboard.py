"""`tracker=tensorboard`: TensorBoard's own reader reads the logged data."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dflash_mcmc.errors import UserError
from dflash_mcmc.tracker import RunInfo
from dflash_mcmc.tracker.tensorboard import TensorBoardTracker


def read(folder) -> EventAccumulator:
    return EventAccumulator(str(folder), size_guidance={"tensors": 0, "scalars": 0, "images": 0}).Reload()


def text(found: EventAccumulator, name: str) -> str:
    """The text that was logged last under a name."""
    return found.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode()


def test_tables_and_figures(tmp_path):
    from matplotlib.image import imread, imsave

    picture = np.zeros((3, 5, 3))
    picture[1, 2] = (1.0, 0.5, 0.0)
    imsave(tmp_path / "ranks.png", picture)
    run = TensorBoardTracker().start(RunInfo("0a1b", "e", "c", {}, tmp_path))
    run.summary({"mean": 0.5, "condition": "c", "none": None}, [{"problem": "p", "chain": 0}])
    run.publish(tmp_path, {"means": [{"layer": 1, "why": "a|b\nc"}], "empty": []}, [tmp_path / "ranks.png"])
    run.finish(0)
    found = read(tmp_path)
    assert text(found, "tables/means").splitlines()[2] == "| 1       | a\\|b c |"
    assert found.Scalars("summary/mean")[0].value == 0.5
    assert "samples/text_summary" not in found.Tags()["tensors"]
    (image,) = found.Images("figures/ranks")
    (tmp_path / "back.png").write_bytes(image.encoded_image_string)
    assert np.array_equal(imread(tmp_path / "back.png"), imread(tmp_path / "ranks.png"))


def test_a_missing_package_is_an_error_of_one_line_before_sampling(make_config, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "tensorboard" else find(name, *rest))
    with pytest.raises(UserError, match=r"tracker=tensorboard: the package .* pip install tensorboard"):
        make_config("tracker=tensorboard")
    assert not list(tmp_path.iterdir())
