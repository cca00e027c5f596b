"""Prompts for the training of a draft: held-out problems are in no training part."""

import json
import runpy
import sys

from launchers import mixed_prompts

ROWS = {"gsm8k/test.jsonl": ("question", 1204), "math500/test.jsonl": ("problem", 404),
        "humaneval/HumanEval.jsonl": ("prompt", 126)}


def test_held_out_problems_are_in_no_training_part(tmp_path, monkeypatch):
    for file, (name, count) in ROWS.items():
        path = tmp_path / file
        path.parent.mkdir()
        path.write_text("".join(json.dumps({name: f"{name} {{{n}}}"}) + "\n" for n in range(count)))
    monkeypatch.setattr(sys, "argv", ["mixed_prompts.py", str(tmp_path), str(tmp_path / "out.jsonl")])
    runpy.run_path(mixed_prompts.__file__, run_name="__main__")
    whole = [json.loads(line)["question"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = {part: mixed_prompts.lines(tmp_path, part) for part in ("training", "unmeasured", "gsm8k", "math", "text")}
    assert whole == found["training"]
    training, last = whole[:-14], whole[-14:]  # 4 + 4 + 2 + 4 held-out ones, fewer than in the whole files
    held_out = [text for part in ("gsm8k", "math", "text") for text in found[part][4:]]
    assert (len(found["gsm8k"]), len(found["math"]), len(found["text"])) == (8, 8, 66)
    assert len(training) == 3 * (1200 + 400) + 2 * 124 + 240  # every problem in each of its forms
    assert set(last) <= set(held_out)
    assert not set(training) & set(held_out)
    assert any("question {0}" in text for text in training)
    unmeasured = found["unmeasured"][:-14]
    assert len(unmeasured) == 4 * 1000 + 3 * 400 + 240
    assert found["unmeasured"][-14:] == last
    assert not any("question {199}" in text or "prompt {" in text for text in unmeasured)
    assert sum("question {200}" in text for text in unmeasured) == 4
