"""What only a GPU shows: CUDA graphs, kernels of attention, bfloat16, peak memory against its plan, memory that runs out."""

import numpy as np
import pytest
import torch

from dflash_mcmc.engine import slots
from dflash_mcmc.engine.batching import batched
from dflash_mcmc.engine.batching.attention import OWN
from dflash_mcmc.engine.batching.cache import KVCache
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.process import program

pytestmark = pytest.mark.gpu
SAMPLERS = {
    "temperature": ("sampler=temperature",), "power_mh": ("sampler=power_mh", "sampler.num_blocks=4"),
    "draft_mh": ("sampler=draft_mh", "draft=tiny"), "blend": ("sampler=power_mh", "sampler.num_blocks=4", "blend=layer"),
    "speculation": ("sampler=temperature", "draft=tiny", "decoder=speculative_match"),
}
CHAINS = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS.keys())


def compare(ours, theirs):
    """Number of chains whose tokens differ, and the largest difference of log p among the equal ones."""
    different, largest = 0, 0.0
    for name, chain in ours.items():
        one, other = chain.trajectory, theirs[name].trajectory
        if one.tokens.tolist() != other.tokens.tolist():
            different += 1
        else:
            largest = max(largest, float(np.abs(one.log_p - other.log_p).max(initial=0.0)))
    return different, largest


@CHAINS
def test_tokens_in_float32_are_those_of_the_cpu(draw, device, sampler):
    different, largest = compare(draw(*sampler, f"hardware.device={device}"), draw(*sampler, "hardware.device=cpu"))
    assert different <= 1  # a uniform next to the border of two tokens
    assert largest < 1e-3


@CHAINS
def test_cuda_graphs_change_nothing(draw, on_gpu, sampler, monkeypatch):
    replayed = draw(*sampler, "hardware.device=cuda")
    monkeypatch.setattr(batched, "graphed", lambda stepper, reason, endings: stepper)
    launched = draw(*sampler, "hardware.device=cuda")
    different, largest = compare(replayed, launched)
    assert different == 0
    assert largest < 1e-5


def test_a_layer_launches_at_most_twelve_kernels(make_config, on_gpu):
    """As the profiler counts them, which sees a product of cuBLAS that takes two."""
    config = make_config("hardware.device=cuda")
    model = config.engine.load(config, "cuda")
    assert model.loop_under(OWN) is not None
    runner, cache = ModelRunner(model, None, OWN, 256, 256, 8), KVCache(model.cache_shape, 8, 256, "cuda")
    tokens = torch.zeros(8, 1, dtype=torch.int64, device="cuda")
    with torch.inference_mode(), runner.ready():
        runner.forward(cache, slice(0, 8), tokens, tokens, 256)  # kernels are compiled
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            runner.forward(cache, slice(0, 8), tokens, tokens, 256)
    ran = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(ran) <= 12 * len(model.layers) + 30, ran  # embedding, rotation and the last norm


@pytest.mark.parametrize("num_slots", [1, 7, 24])
def test_the_number_of_slots_changes_hardly_a_token(draw, device, num_slots):
    where = f"hardware.device={device}"
    few = draw(*SAMPLERS["power_mh"], where, f"hardware.num_slots={num_slots}")
    different, largest = compare(few, draw(*SAMPLERS["power_mh"], where))
    assert different <= 1
    assert largest < 1e-3


@pytest.mark.parametrize("attention", ["auto", "sdpa", "eager", "grouped"])
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-3), ("bfloat16", 0.5)])
def test_kernels_of_attention_agree(draw, device, attention, dtype, bound):
    """The bound in bfloat16 is that of rounded activations: 8 layers with errors of 2^-9 each."""
    found = draw("sampler=temperature", f"hardware.device={device}", f"hardware.attention={attention}", f"model.dtype={dtype}")
    exact = draw("sampler=temperature", "hardware.device=cpu")
    different, largest = compare(found, exact)
    assert different <= (1 if dtype == "float32" else 16)
    assert largest < bound


def test_the_copy_of_the_head_hardly_changes_log_p(draw, device):
    common = ("sampler=temperature", f"hardware.device={device}", "model.dtype=bfloat16")
    different, largest = compare(*(draw(*common, f"model.head_copy={copied}") for copied in ("true", "false")))
    assert different <= 1
    assert largest < 1e-3


def test_peak_memory_is_as_planned(make_config, on_gpu, draw):
    overrides = (*SAMPLERS["power_mh"], "hardware.device=cuda", "hardware.memory_gb=1")
    config = make_config("dataset=arith", "dataset.limit=24", "dataset.max_new_tokens=64", "num_chains=1", *overrides)
    model = config.engine.load(config, "cuda")
    planned = slots.memory_plan(config, model, 64, 24, None)[1]
    draw(*overrides)  # kernels and their work space are loaded
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    draw(*overrides)
    peak = torch.cuda.max_memory_allocated() - before
    assert 0.5 * planned.caches < peak < 1.1 * planned.total


def test_memory_that_runs_out_is_one_line_and_the_next_run_works(draw, on_gpu, capsys):
    total = torch.cuda.get_device_properties(0).total_memory
    draw(*SAMPLERS["power_mh"], "hardware.device=cuda")
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 4e6) / total)
    try:
        code = program.guarded(lambda: draw(*SAMPLERS["power_mh"], "hardware.device=cuda", "hardware.memory_gb=2") and None)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert code == program.USER_ERROR
    assert "error: hardware.memory_gb: the memory ran out" in capsys.readouterr().err
    assert len(draw(*SAMPLERS["power_mh"], "hardware.device=cuda")) == 24
