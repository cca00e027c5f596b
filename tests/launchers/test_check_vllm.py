"""The table of what engine=vllm does here: runs that fail are a line, and end no other run."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from launchers import check_vllm


@pytest.mark.parametrize("has_vllm", [True, False])
def test_the_table_says_what_ran_and_what_did_not(tmp_path, monkeypatch, capsys, has_vllm):
    monkeypatch.chdir(tmp_path)
    commands = []

    def run(command, **options):
        commands.append(command)
        values = dict(each.split("=", 1) for each in command[3:])
        if values["engine"] == "vllm" and not has_vllm:
            return SimpleNamespace(returncode=2, stderr="a warning\nerror: engine: given 'vllm'; allowed: slots\n\n")
        folder = tmp_path / values["paths.outputs"] / values["name"] / "run"
        folder.mkdir(parents=True)
        tokens = [1, 2, len(values["engine"])]  # of one answer in two they differ
        records = [{"problem": "a", "chain": chain, "tokens": tokens[: 2 + chain], "num_tokens": 2 + chain,
                    "share_seconds": 0.1, "verdict": "correct" if chain else "wrong"} for chain in (0, 1)]
        (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert check_vllm.main(["model=qwen3_4b", "dataset.limit=3"]) == (0 if has_vllm else 3)
    assert len(commands) == 6
    assert all("dataset.limit=20" not in command and "model=qwen3_4b" in command for command in commands)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[3:]]
    assert [row[0] for row in rows] == ["parity"] * 2 + ["rate"] * 2 + ["table"] * 2
    assert [row[3] for row in rows if row[1] == "slots"][1:] == ["25 tokens/s", "1 of 2 correct"]
    state, found = rows[1][2:]
    assert (state, found) == (("ran", "1 of 2 answers of slots, but for near-ties all of them") if has_vllm else
                              ("did not run: error: engine: given 'vllm'; allowed: slots", ""))
