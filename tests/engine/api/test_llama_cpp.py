"""Through a real server of llama.cpp, in an environment that has xllamacpp: `LLAMA_PYTHON=PYTHON make test ...`.

    python -m venv llama && llama/bin/pip install xllamacpp
    LLAMA_PYTHON=llama/bin/python python -m pytest tests/engine/api/test_llama_cpp.py
"""

import importlib.util
import os
import subprocess
import sys

import pytest

import dflash_mcmc as dm
from dflash_mcmc.engine.api import endpoint
from dflash_mcmc.engine.api.session import ApiEngine
from dflash_mcmc.errors import UserError
from dflash_mcmc.verify import __main__ as verify
from dflash_mcmc.verify.drawn import write_cases
from tests import runs
from tests.engine.api.test_law import drawn, moved, p_value
from tests.engine.api.test_served import law_of_tiny, records

PYTHON = os.environ.get("LLAMA_PYTHON") or (sys.executable if importlib.util.find_spec("xllamacpp") else "")
SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx = sys.argv[1], 8, 8 * 512
params.port, params.hostnames, params.warmup = 0, ["127.0.0.1"], False
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
pytestmark = pytest.mark.skipif(not PYTHON or not importlib.util.find_spec("gguf"), reason="xllamacpp is not installed")


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama") / "cases"
    write_cases(verify._stated(["model=tiny", "dataset=arith"]), folder)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen([PYTHON, "-c", SERVER, str(folder / "target.gguf")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True, cwd=folder, env=environment) as program:
        assert program.stdout is not None
        yield program.stdout.readline().strip() + "/v1"
        program.kill()


CASES = {"lists, at temperature 4": ("top", 3, 3, 4.0), "raw, at temperature 1": ("raw", 0, 1, 1.0)}


@pytest.mark.parametrize("chains", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
def test_the_law_through_llama_cpp(url, make_config, case, chains):
    logprobs, top, horizon, temperature = CASES[case]
    engine = dm.Api(url=url, logprobs=logprobs)
    target = engine.load(make_config("model=tiny"), "cpu")
    prompt = target.encode("Answer: ")
    p, q = law_of_tiny(prompt, temperature, top or target.vocab_size, horizon)
    sampler = dm.PowerMH(alpha=2.0, proposal_temperature=temperature, top_k=top, num_blocks=1, num_steps=1, early_reject="off")
    found = drawn(ApiEngine(target, endpoint.Endpoint(engine), logprobs, 8, 32), sampler, prompt, horizon, chains)
    assert p_value(found, moved(p, q, 2.0, 1)) > 1e-4
    assert p_value(found, q) < 1e-6


def test_greedy_answers_and_the_audit(url, make_config):
    """The audit passes, and tokens are those of this package's own engine, in float32."""
    demo = ("experiment=demo", "condition=greedy", "dataset.limit=16", "dataset.max_new_tokens=64")
    here, there = records(make_config(*demo)), records(make_config(*demo, "engine=api", f"engine.url={url}"))
    assert sum(one["tokens"] == here[key]["tokens"] for key, one in there.items()) >= 15  # a near-tie may part
    assert all(one["log_p"] == pytest.approx(here[key]["log_p"], abs=0.01) for key, one in there.items()
               if one["tokens"] == here[key]["tokens"])


def test_what_llama_cpp_does_not_tell_is_refused_in_one_line(url, make_config):
    demo = ("experiment=demo", *runs.QUICK, "dataset.limit=2", "engine=api", f"engine.url={url}")
    for more, said in (((), r"engine.logprobs: given 'raw'; allowed: with draws at temperature 0\.25"),
                       (("engine.logprobs=processed",), "engine.logprobs: given 'processed'; allowed: raw or top")):
        with pytest.raises(UserError, match=said):
            runs.execute(make_config(*demo, *more))


