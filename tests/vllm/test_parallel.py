"""Two processes for one model, on a CPU: the tokens of one process, and nothing that stays behind."""

from __future__ import annotations

import psutil
import pytest

from dflash_mcmc.inference.vllm import core, scratch
from dflash_mcmc.rng import Key
from tests.inference.test_batched import PROMPTS, SAMPLERS, STOPS
from tests.targets import random_model
from tests.vllm.running import TOLERANCE, Comparison, engine_of, target_of
from tests.vllm.test_blended import WIDE
from tests.vllm.test_families import random_family

EAGER = (("block_size", 32), ("enforce_eager", True))
WAYS = {"tensor": (("tensor_parallel_size", 2),), "pipeline": (("pipeline_parallel_size", 2),),
        "expert": (("tensor_parallel_size", 2), ("enable_expert_parallel", True))}


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_draw_the_tokens_of_one(tmp_path, way):
    if way == "expert":
        model, _ = random_family("qwen3_moe", num_key_value_heads=2)
        target, prompts = target_of(model, tmp_path, [3]), [prompt % 64 for prompt in PROMPTS[:2]]
    else:
        model = random_model("qwen3", **{**WIDE, "num_key_value_heads": 2})
        target, prompts = target_of(model, tmp_path, STOPS), PROMPTS[:2]

    def chains():
        return [(index, SAMPLERS["power_mh_early"].chain(prompt, 6, Key(index))) for index, prompt in enumerate(prompts)]

    one = {done.tag: done for done in engine_of(target).run(chains())}
    before, segments = set(psutil.Process().children(recursive=True)), set(scratch.SEGMENTS.glob("vllm_dist_*"))
    two = {done.tag: done for done in engine_of(target, more=EAGER + WAYS[way]).run(chains())}
    workers = set(psutil.Process().children(recursive=True)) - before
    assert len([worker for worker in workers if any("Worker_" in word for word in worker.cmdline())]) == 2
    core.close_shared()
    found = Comparison.of(two, lambda tag: one[tag].result)
    print(way, found)
    assert (found.equal, found.chains) == (2, 2)
    assert max(found.log_p, found.log_q) < TOLERANCE
    _, left = psutil.wait_procs([worker for worker in workers if "resource_tracker" not in " ".join(worker.cmdline())], 30)
    assert not left
    assert set(scratch.SEGMENTS.glob("vllm_dist_*")) <= segments
