"""The memory plan equals the allocated memory. An engine that does not fit is refused with an error that gives the sizes."""

import pytest
import torch

from dflash_mcmc.blend.none import NoBlend
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.cache import cache_size
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.plan import TargetShape, Workload, plan, predict
from dflash_mcmc.errors import ConfigError
from tests.targets import random_model


@pytest.fixture(scope="module")
def model():
    return LanguageModel(random_model(), stop_ids=(3,))


@pytest.mark.parametrize("read_ahead", [32, 3])
def test_caches_are_as_large_as_predicted(model, read_ahead):
    options = Options(read_ahead=read_ahead)
    engine = BatchedEngine(model, NoBlend(), 12, 150, options, prompt_length=100)
    memory, rows = engine._memory, engine._loop.rows
    memory.reserve(150)
    memory.spare.reserve(memory.cache.length)
    caches = [memory.cache, memory.spare, memory.prompts._cache]
    held = sum(cache.keys.nbytes + cache.values.nbytes for cache in caches)
    held += rows.tokens.nbytes + rows.uniforms.nbytes + rows.scores.nbytes
    assert predict(Workload(model, 150, 100, options), 12).caches == held


@pytest.mark.parametrize(("dtype", "is_copied"), [(torch.float32, False), (torch.bfloat16, True)])
def test_grouped_attention_in_half_precision_takes_a_layer_of_keys_in_float32(dtype, is_copied):
    model = LanguageModel(random_model().to(dtype), stop_ids=(3,))
    ours, theirs = (predict(Workload(model, 150, 100, Options(attention=name)), 8) for name in ("grouped", "sdpa"))
    rows, length = cache_size(model.device, 8, 150, 0)
    shape = model.cache_shape
    assert ours.step - theirs.step == is_copied * rows * length * shape.num_heads * shape.key_dim * 4
    assert (ours.reading > theirs.reading) == is_copied


def test_slots_that_do_not_fit_are_refused_with_the_numbers(model):
    work = Workload(model, 150, 100, Options())
    one = predict(work, 8).total
    with pytest.raises(ConfigError) as refused:
        plan(work, 64, 1000, 1.2 * one / 1e9)
    text = str(refused.value)
    assert text.startswith("hardware.num_slots: given 64; allowed: at most 8 (64 slots of up to 150 tokens take at least "
                           "21.3 MB, of which 11.6 MB are keys and values; there are ")
    assert "hardware.memory_gb" in text
    for num_slots in (64, None):
        with pytest.raises(ConfigError, match=r"hardware\.memory_gb: given 1e-05; allowed: at least 0\.\d+ \(.* MB\), "
                                              "for one slot of up to 150 tokens; or engine=vllm, whose memory follows"):
            plan(work, num_slots, 1000, 1e-5)


def test_the_number_of_slots_that_a_refusal_names_fits(model):
    work = Workload(model, 150, 100, Options())
    memory_gb = predict(work, 20).total / 1e9
    with pytest.raises(ConfigError, match=r"allowed: at most \d+ \(64 slots of up to 150 tokens take") as refused:
        plan(work, 64, 1000, memory_gb)
    most = int(str(refused.value).split("at most ")[1].split()[0])
    assert plan(work, most, 1000, memory_gb).num_slots == most
    with pytest.raises(ConfigError):
        plan(work, most + 1, 1000, memory_gb)


def test_null_takes_what_fits_and_no_more_than_there_are_chains(model):
    work = Workload(model, 150, 100, Options())
    one = predict(work, 8).total
    assert plan(work, None, 1000, 1.2 * one / 1e9).num_slots == 8
    assert plan(work, None, 1000, None).num_slots == 256
    assert plan(work, None, 5, None).num_slots == 5
    assert plan(work, 3, 1000, None).num_slots == 3


def test_a_plan_is_described_in_a_line(model):
    planned = plan(Workload(model, 1500, 100, Options()), 16, 1000, 1)
    assert planned.describe(2_000_000_000).startswith("memory: weights 2.00 GB; keys and values 20.8 MB for 16 slots")
    assert "for 16 slots of 1,500 tokens; work space 4.86 MB; free 0.9" in planned.describe()


def test_a_plan_says_what_runs_the_layers():
    def said(target, **options) -> str:
        return predict(Workload(target, 150, 100, Options(**options)), 2).describe().partition("\nlayers: ")[2]

    wide = dict(hidden_size=64, intermediate_size=128, head_dim=16)
    assert said(LanguageModel(random_model("qwen3", **wide), packs=False)).startswith("modules of transformers (")
    config, cuda = random_model("qwen3").config, torch.device("cuda")
    assert said(TargetShape(config, torch.device("cpu"), torch.float32, 1)) == "the loop of this package"
    assert said(TargetShape(config, cuda, torch.float32, 1)) == "the loop of this package, where Triton is installed"
    for other in (said(TargetShape(config, cuda, torch.float32, 1), attention="sdpa"),
                  said(TargetShape(random_model("gpt2").config, cuda, torch.float32, 1))):
        assert other.startswith("modules of transformers (")
