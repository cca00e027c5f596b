"""Two processes for one model, on a CPU: the tokens of one process, and no process that stays behind."""

import contextlib

import psutil
import pytest

from dflash_mcmc.engine.vllm import core
from dflash_mcmc.rng import Key
from tests.engine.batching.test_batched import PROMPTS, SAMPLERS, STOPS
from tests.processes import HANG
from tests.targets import random_model
from tests.vllm.running import TOLERANCE, Comparison, engine_of, target_of
from tests.vllm.test_blended import WIDE
from tests.vllm.test_families import random_of

TENSOR = {"tensor_parallel_size": 2}
WAYS = {"tensor": ("qwen3", TENSOR), "pipeline": ("qwen3", {"pipeline_parallel_size": 2}), "experts": ("qwen3_moe", TENSOR)}
"""A model and what is shared. With experts each process has a part of each one: vLLM has no whole ones on a CPU."""


def workers_of(parent: psutil.Process) -> list[psutil.Process]:
    """vLLM's workers among the children of a process, of which others may be ending."""
    found = []
    for child in parent.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("Worker_" in word for word in child.cmdline()):
                found.append(child)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_draw_the_tokens_of_one(tmp_path, way):
    family, shared = WAYS[way]
    heads = {"num_key_value_heads": 2}
    model = random_model("qwen3", **{**WIDE, **heads}) if family == "qwen3" else random_of(family, **heads)
    target = target_of(model, tmp_path, STOPS if family == "qwen3" else [3])

    def chains():
        return [(index, SAMPLERS["power_mh_early"].chain(prompt % target.vocab_size, 6, Key(index)))
                for index, prompt in enumerate(PROMPTS[:2])]

    one = {done.tag: done for done in engine_of(target).run(chains())}
    two = {done.tag: done for done in engine_of(target, **shared).run(chains())}
    workers = workers_of(psutil.Process())
    assert len(workers) == 2
    core.close_shared()
    found = Comparison.of(two, lambda tag: one[tag].result)
    print(way, found)
    assert (found.equal, found.chains) == (2, 2)
    assert max(found.log_p, found.log_q) < TOLERANCE
    _, left = psutil.wait_procs(workers, HANG)
    assert not left
