"""Audits by the number of requests at once: each fault that load alone shows, and a right server."""

import json

import pytest

from dflash_mcmc.engine.api import endpoint
from dflash_mcmc.verify import __main__ as program
from tests.verify.crafted_server import FAULTS, CraftedServer, one_layer
from tests.verify.test_verify import told

ABOVE = {"late": 4, "neighbour": 12, "seed": 4, "stale": 4, "bonus": 12}
"""Requests at once above which each fault appears; the levels of an audit are 1, 8 and 24."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return one_layer(tmp_path_factory.mktemp("crafted") / "model")


def given(checkpoint, chains: int, tokens: int = 16) -> list[str]:
    return ["model=hf", f"model.path={checkpoint}", "model.chat=false", "dataset=arith", "dataset.prompt={question}",
            "dataset.limit=4", f"num_chains={chains}", f"dataset.max_new_tokens={tokens}"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_beside_other_requests_is_red_where_it_appears(fault, checkpoint, tmp_path, capsys, monkeypatch):
    command = ["http://crafted/v1", *given(checkpoint, 16), f"paths.outputs={tmp_path}", "--concurrency", "1,8,24"]
    server = CraftedServer(program._stated(given(checkpoint, 16)).model.load("cpu"), fault, ABOVE[fault])
    monkeypatch.setattr(endpoint, "fetch_json", server.fetch)
    try:
        code, out, _ = told(command, capsys)
    finally:
        server.close()
    at = 8 if ABOVE[fault] < 8 else 24
    assert code == 1
    assert f"At {at} requests at once: RED" in out.splitlines()[0], out
    (found,) = [json.loads(file.read_text()) for file in tmp_path.glob("verify/*/verify.json")]
    rows = {row["check"]: row["outcome"] for row in found["behaviour"]}
    wrong = [number for number in (1, 8, 24)
             if {rows[f"{what}, {number} at once"] for what in ("the law", "log p")} != {"right"}]
    assert wrong == [number for number in (1, 8, 24) if number > ABOVE[fault]]
    assert rows["the same seed, 8 at once and 1"] == ("differs" if ABOVE[fault] < 8 else "right")


@pytest.mark.slow
def test_a_promise_of_bits_and_wrong_commands(checkpoint, tmp_path, capsys, monkeypatch):
    """A server whose draws depend on the batch has the law, which the promise alone makes wrong."""
    common = ["http://crafted/v1", *given(checkpoint, 2, 4), f"paths.outputs={tmp_path}"]
    server, seeds = CraftedServer(program._stated(given(checkpoint, 2)).model.load("cpu")), iter(range(1 << 20))
    monkeypatch.setattr(endpoint, "fetch_json", lambda url, body=None, **more: server.fetch(
        url, body and {**body, "seed": next(seeds) if body["temperature"] else body["seed"]}, **more))
    try:
        code, out, _ = told([*common, "--concurrency", "1,4"], capsys)
        assert (code, ", red at 10^3.3)" in out) == (0, True), out  # each number has half of the level
        code, out, _ = told([*common, "--concurrency", "1,4", "--bits"], capsys)
    finally:
        server.close()
    assert (code, out.startswith("RED besides the law: the same seed, 4 at once and 1. The law: At 4 requests")) == (1, True)
    for wrong, says in ((["--concurrency", "8,1"], "--concurrency: given 8,1; allowed: rising numbers"),
                        (["--concurrency", "1,9"], "up to 8, the texts"), (["--concurrency", "x"], "--concurrency: given x"),
                        (["--bits"], "--bits: given without a server and --concurrency"),
                        (["--concurrency", "1", "--against", "x"], "--concurrency: given without a server, or with")):
        code, _, err = told([*common, *wrong], capsys)
        assert (code, says in err, len(err.strip().splitlines()[-1:])) == (2, True, 1), err
