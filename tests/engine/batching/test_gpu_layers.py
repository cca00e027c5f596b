"""The layers on a GPU, on a CPU: their kernels in Triton's interpreter and compiled for real GPUs, and what a step launches.

Triton has to be imported with TRITON_INTERPRET=1 for its interpreter. So functions `interpreted_...` are tests of a process of
their own, which `test_kernels_in_the_interpreter` starts.
"""

import importlib
import itertools
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3Model

from dflash_mcmc.draft.network.dflash import DFlash, DFlashShape
from dflash_mcmc.engine.batching.attention import OWN
from dflash_mcmc.engine.batching.batched import BatchedEngine
from dflash_mcmc.engine.batching.cache import CacheShape, KVCache
from dflash_mcmc.engine.batching.interface import Options
from dflash_mcmc.engine.batching.language_model import LanguageModel
from dflash_mcmc.engine.batching.model_runner import ModelRunner
from dflash_mcmc.engine.speculative.drafter import Anchors, DFlashDrafter
from dflash_mcmc.rng import Key
from tests.cases import quick
from tests.draft.network.test_dflash import QWEN3_4B as DRAFT_4B, random_draft
from tests.engine.batching.test_batched import BLENDS, PROMPTS, SAMPLERS, all_same
from tests.engine.speculative.test_speculator import drafter, match
from tests.processes import ROOT
from tests.targets import random_model

triton = pytest.importorskip("triton", reason="Triton has packages for Linux alone")
gpu_layers = importlib.import_module("dflash_mcmc.engine.batching.gpu")

SMALL = dict(num_hidden_layers=2, hidden_size=48, intermediate_size=80, num_attention_heads=6, num_key_value_heads=2,
             head_dim=8)
"""Three heads share a key head; no size is a power of two."""
STEPS = ((0, 5, 2), (5, 1, 1), (6, 1, 2), (7, 2, 2))
"""First position, tokens and rows of a forward. The first one reads the rows in another order."""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["not slow", "slow"])
def test_kernels_in_the_interpreter(which):
    """Those of the layers and of the draw, in one process."""
    files = (str(Path(__file__).with_name(f"test_gpu_{name}.py")) for name in ("layers", "draw"))
    arguments = ["-m", "pytest", *files, "-o", "python_functions=interpreted_*", "-m", which, "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"},
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]


def looped(monkeypatch, family: str = "qwen3", **changes) -> LanguageModel:
    """A small model whose layers run in the loop of a GPU under `OWN`, with two parts of a row."""
    monkeypatch.setattr(gpu_layers, "_PROGRAMS", 8)
    model = LanguageModel(random_model(family, **{**SMALL, **changes}), stop_ids=(3, 7))
    model._loop = gpu_layers.GpuLoop(model.decoder)
    return model


def forwards(model: LanguageModel, attention: str, window: int | None = None, skipped: list[int] | None = None,
             steps: tuple = STEPS) -> list[torch.Tensor]:
    """What forwards give: hidden states, outputs of embedding and layers, and the cache."""
    found, runner, cache = [], ModelRunner(model, None, attention, 64, 64, 8), KVCache(model.cache_shape, 2, 64)
    with torch.inference_mode(), runner.ready(), model.tapped((-1, 0, 1)) as tapped:
        for number, (start, queries, count) in enumerate(steps):
            tokens = torch.arange(count * queries).view(count, queries) * 7 % model.vocab_size
            positions = (start + torch.arange(queries)).repeat(count, 1)
            rows = slice(0, count) if number else torch.tensor([1, 0])
            before = None if skipped is None else torch.tensor(skipped)[:count]
            found += [runner._forward(cache, rows, tokens, positions, 64, window, before), *tapped]
    return [*found, cache.keys, cache.values]


def differ(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    """The largest difference of any number."""
    return max(float((one.double() - other.double()).abs().max()) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("family", quick(["qwen3", "qwen2", "llama"], "qwen3"))
def interpreted_numbers_are_those_of_the_modules_in_float64(family, monkeypatch):
    exact = LanguageModel(random_model(family, **SMALL).double(), stop_ids=(3, 7))
    assert differ(forwards(looped(monkeypatch, family), OWN), forwards(exact, "grouped")) < 2e-5


@pytest.mark.slow
@pytest.mark.parametrize("hooked", ["embed_tokens", "layers.0", "layers.1.mlp"])
def interpreted_numbers_after_a_hook_that_changes_an_output_are_those_of_the_modules(hooked, monkeypatch):
    """Hooks of other modules than embedding and layers leave the step to the modules."""
    model, steps = looped(monkeypatch), ((0, 2, 2),)
    before = forwards(model, "grouped", steps=steps)
    model.decoder.get_submodule(hooked).register_forward_hook(lambda module, given, output: output + 0.5)
    assert model._loop.is_hooked == (hooked == "layers.1.mlp")
    ours, theirs = (forwards(model, name, steps=steps) for name in (OWN, "grouped"))
    assert differ(ours, theirs) < 2e-5 < differ(ours, before)


@pytest.mark.slow
def interpreted_numbers_of_a_changed_decoder_are_refused(monkeypatch):
    monkeypatch.setattr(gpu_layers, "_ROWS", 1)
    model, device = looped(monkeypatch), torch.device("cpu")
    assert isinstance(gpu_layers.loop_of(model.decoder, model.cache_shape, device), gpu_layers.GpuLoop)
    module = model.decoder.layers[1].mlp
    before = module.forward
    module.forward = lambda *given: before(*given) + 1e-2
    with pytest.raises(ValueError, match="its numbers differ by "):
        gpu_layers.loop_of(model.decoder, model.cache_shape, device)


@pytest.mark.slow
@pytest.mark.parametrize("seen", [{"window": 3}, {"skipped": [2, 0]}, {"window": 4, "skipped": [1, 3]}])
def interpreted_keys_that_a_token_sees_are_those_of_the_mask(seen, monkeypatch):
    model = looped(monkeypatch)
    assert differ(forwards(model, OWN, **seen), forwards(model, "grouped", **seen)) < 2e-5


@pytest.mark.parametrize(("programs", "first", "dtype", "bound"), quick([
    *((programs, first, torch.float32, 1e-5) for programs in (1, 256) for first in (None, 0, 70)),
    *((programs, 70, torch.float16, 2e-3) for programs in (1, 256))],
    (256, 70, torch.float32, 1e-5), (1, None, torch.float32, 1e-5)))
def interpreted_keys_of_long_rows_are_read_to_their_own_length(dtype, bound, programs, first, monkeypatch):
    """Rows of several tiles and parts, and of one key. What lies after a row's last token is no number."""
    monkeypatch.setattr(gpu_layers, "_PROGRAMS", programs)
    generator, shape = torch.Generator().manual_seed(0), CacheShape(1, 1, 16, 16, dtype)
    cache, last = KVCache(shape, 3, 160), torch.tensor([[150, 151, 152], [71, 72, 73], [0, 1, 2]])
    for memory in (cache.keys, cache.values):
        memory.copy_(torch.randn(memory.shape, generator=generator))
        for row, end in enumerate(last[:, -1].tolist()):
            memory[:, row, :, end + 1 :] = torch.nan
    begin = None if first is None else (last - 5).clamp(min=0) if first else torch.zeros_like(last)
    queries = torch.randn(3, 3, 2, 16, generator=generator).to(dtype)
    cache.aim(slice(0, 3), last, 160)
    mixed = gpu_layers.attended(queries.view(9, 32), cache.kv_layers[0], begin, last, 2, 0.25).view(3, 3, 2, 16)
    for row in range(3):
        for query in range(3):
            mine = slice(0 if begin is None else int(begin[row, query]), int(last[row, query]) + 1)
            exact = scaled_dot_product_attention(queries[row, query, :, None].double(), *(
                memory[0, row, :, mine].double().expand(2, -1, -1) for memory in (cache.keys, cache.values)), scale=0.25)[:, 0]
            assert float((mixed[row, query] - exact).abs().max()) < bound, (row, query)


def interpreted_bits_of_half_precision_are_those_of_the_modules():
    """Kernels round where the modules do. float16, because the interpreter rounds bfloat16 to zero."""
    model = LanguageModel(random_model("qwen3", **SMALL).half(), stop_ids=(3, 7))
    layer, generator = model.decoder.layers[0], torch.Generator().manual_seed(0)
    stream, added, both = (torch.randn(4, size, generator=generator).half() for size in (48, 48, 160))
    with torch.inference_mode():
        summed, normed = gpu_layers.normed(layer.input_layernorm, stream, added)
        assert torch.equal(summed, stream + added)
        assert differ([normed], [layer.input_layernorm(stream + added)]) < 2e-3
        assert float((normed == layer.input_layernorm(stream + added)).float().mean()) > 0.95  # sums of squares have an order
        gated = gpu_layers.gated(both)
        assert float((gated == silu(both[:, :80]) * both[:, 80:]).float().mean()) > 0.95


@pytest.mark.slow
@pytest.mark.parametrize(("blend", "draft"), [("none", None), ("layer_final", None), ("layer", "self"), ("none", "dflash")])
def interpreted_chains_of_an_engine_are_those_of_the_modules(blend, draft, monkeypatch):
    """Prompts, cuts, early rejection, blends that read layers, and blocks of a draft, over two slots."""
    model, found = looped(monkeypatch, num_hidden_layers=3), []
    for attention in (OWN, "grouped"):
        speculation = match().speculation(drafter(draft, model, model.decoder)) if draft else None
        engine = BatchedEngine(model, BLENDS[blend], 2, 32, Options(attention=attention), None, speculation)
        with monkeypatch.context() as patched:
            if attention != OWN:
                patched.setattr(model, "_loop", None)
            assert (model.loop_under(attention) is None) is (attention != OWN)
            chains = ((number, SAMPLERS["power_mh_early"].chain(PROMPTS[number], 5, Key(number))) for number in range(2))
            found.append({done.tag: done for done in engine.run(chains)})
    all_same(*found)


@pytest.mark.slow
@pytest.mark.parametrize(("sliding", "causal", "bias"), [
    ((None, None), None, False), ((4, None), None, True), ((3, 6), False, False), ((None, 4), True, False)])
def interpreted_blocks_of_a_draft_are_those_of_its_modules(sliding, causal, bias, monkeypatch, random_weights):
    """Features of two rows of different lengths, then a block after each. Each block lies beside what is no number."""
    model, generator, found = looped(monkeypatch), torch.Generator().manual_seed(0), []
    shape = DFlashShape(hidden_size=48, num_layers=2, num_heads=6, num_key_heads=2, head_dim=8, intermediate_size=80,
                        bias=bias, target_layers=(0, 1), rope={"rope_type": "default", "rope_theta": 1e4}, max_positions=64,
                        sliding=sliding, causal=causal, block_size=4, mask_token_id=2)
    features = [torch.randn(2, 9, 48, generator=generator) for _ in range(2)]
    rows, positions, tokens = torch.tensor([2, 0]), torch.arange(9).repeat(2, 1), torch.arange(96).view(3, 32) % 61
    for looping in (True, False):
        network = random_draft(shape)
        draft = DFlashDrafter(network, model, 4)
        cache = KVCache(model.cache_shape, 3, 32, companions=(draft.companion,))
        at = Anchors(rows, cache, tokens, torch.tensor([9, 5]), 32)
        with torch.inference_mode(), model.attending(OWN if looping else "grouped"):
            draft.absorb(cache.drafts, rows, tokens[rows, :9], positions, features)
            aside = draft.hidden_aside(at)
            if looping:
                cache.drafts.keys[:, 0, :, 9:], cache.drafts.values[:, 2, :, 13:] = torch.nan, torch.nan
            found.append([aside, draft.hidden(at), *(memory[:, 2, :, :13].clone() for memory in (
                cache.drafts.keys, cache.drafts.values))])
        assert (draft._loop is not None) is looping
    assert differ(*found) < 5e-5


QWEN3_4B = dict(hidden_size=2560, intermediate_size=9728, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
KERNELS = {"layers": ("_add_norm", "_place", "_attend", "_combine", "_gate"), "draw": ("_weigh", "_draw")}


class Launches(TorchDispatchMode):
    """The kernels of a forward: those of Triton, which do not run, and the operations of PyTorch that compute something."""

    def __init__(self, patch: pytest.MonkeyPatch):
        super().__init__()
        self.ours, self.theirs = list[tuple](), Counter[str]()
        for name in itertools.chain(*KERNELS.values()):
            patch.setattr(gpu_layers, name, self._recorder(getattr(gpu_layers, name)))

    def _recorder(self, kernel: Any) -> Any:
        ours = self.ours

        class Recorder:
            def __getitem__(self, grid):
                return lambda *given, **options: ours.append((kernel, given, options))

        return Recorder()

    def __torch_dispatch__(self, function, types, given=(), named=None):
        name = function.overloadpacket.__name__
        if not (function.is_view or name in ("empty", "new_empty", "empty_like", "detach", "_unsafe_view", "contiguous")):
            self.theirs[name] += 1
        return function(*given, **(named or {}))


def launches(rows: int, queries: int, layers: int, dtype: torch.dtype = torch.bfloat16) -> Launches:
    """What a forward at Qwen3-4B's shape launches. Tensors have no memory, so that a number which is read is an error."""
    config = Qwen3Config(**QWEN3_4B, num_hidden_layers=layers, vocab_size=512, attn_implementation="sdpa")
    with torch.device("meta"), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        loop = gpu_layers.GpuLoop(Qwen3Model(config).to(dtype).eval())
        cache = KVCache(CacheShape(layers, 8, 128, 128, dtype), rows, 1024, "meta")
        tokens = torch.zeros(rows, queries, dtype=torch.int64)
        cache.aim(slice(0, rows), tokens, 1024)
        with Launches(patch) as found:
            assert loop.hidden(tokens, cache, None, tokens).shape == (rows, queries, 2560)
    return found


@pytest.mark.parametrize(("rows", "queries", "most"), [(1, 1, 10), (8, 1, 10), (64, 1, 9), (256, 1, 9), (1, 16, 10)])
def test_a_layer_launches_ten_kernels_and_reads_nothing_on_the_host(rows, queries, most):
    one, three = (launches(rows, queries, layers) for layers in (1, 3))
    products = three.theirs - one.theirs
    assert products.total() == 2 * 4, products
    assert len(three.ours) - len(one.ours) + products.total() == 2 * most
    assert len(one.ours) + one.theirs.total() < most + 20  # embedding, rotation, the last norm


def blocks(takes_ranges: bool, work: str) -> tuple[int, int]:
    """Kernels of Triton and operations of PyTorch of a block of a DFlash draft for Qwen3-4B, or of the features of a token."""
    with torch.device("meta"), torch.inference_mode(), pytest.MonkeyPatch.context() as patch:
        embedding = torch.nn.Embedding(512, 2560, dtype=torch.bfloat16)
        decoder = SimpleNamespace(get_input_embeddings=lambda: embedding)
        target: Any = SimpleNamespace(takes_ranges=takes_ranges, decoder=decoder)
        draft = DFlashDrafter(DFlash(DRAFT_4B).to(torch.bfloat16).eval(), target, 16)
        cache = KVCache(CacheShape(1, 8, 128, 128, torch.bfloat16), 1, 1024, "meta", (draft.companion,))
        position, features = torch.zeros(1, dtype=torch.int64), [torch.zeros(1, 1, 2560, dtype=torch.bfloat16)] * 5
        tokens = torch.zeros(1, 1024, dtype=torch.int64)
        draft._looped()
        with Launches(patch) as found:
            if work == "block":
                assert draft.hidden(Anchors(slice(0, 1), cache, tokens, position, 1024)).shape == (1, 15, 2560)
            else:
                draft.absorb(cache.drafts, slice(0, 1), position[None], position[None], features)
    return len(found.ours), found.theirs.total()


@pytest.mark.parametrize(("work", "ours", "theirs"), [("block", 31, 39), ("features", 6, 13)])
def test_a_block_of_a_draft_launches_ten_kernels_a_layer(work, ours, theirs):
    """Ten in each of five layers, and for the features of a token two; the modules have 304 and 83."""
    assert blocks(True, work) == (ours, theirs)
    assert sum(blocks(False, work)) > 3 * (ours + theirs)


def test_weights_that_are_joined_exist_once(random_weights):
    layers = [torch.nn.Linear(4, size) for size in (6, 2, 2)]
    before = [(layer.weight.clone(), layer.bias.clone()) for layer in layers]
    weight, bias = gpu_layers.joined(layers)
    assert [(layer.weight.untyped_storage().data_ptr(), layer.bias.untyped_storage().data_ptr()) for layer in layers] == [
        (weight.untyped_storage().data_ptr(), bias.untyped_storage().data_ptr())] * 3
    assert all(torch.equal(layer.weight, one) and torch.equal(layer.bias, other)
               for layer, (one, other) in zip(layers, before, strict=True))


LEAST_SHARED = 99 * 1024
"""Bytes of shared memory that a program may take on every GPU of these generations (8.6, 8.9 and 12.0 have the least)."""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_for_gpus_without_spilling_registers(dtype, capability, monkeypatch, tmp_path):
    """For the launches of one row, of many, and of a block of tokens. PTXAS is part of Triton's package."""
    recorded = [launch for rows, queries in ((1, 1), (1, 16)) for launch in launches(rows, queries, 1, dtype).ours]
    assert compiles(recorded, capability, monkeypatch, tmp_path) == set(KERNELS["layers"])


def compiles(recorded: list[tuple], capability: int, monkeypatch: pytest.MonkeyPatch, folder: Path) -> set[str]:
    """Compiles launches, which may not spill registers. Returns the names of the kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    compiled = {}
    for kernel, given, options in recorded:
        named = list(zip(kernel.params, given, strict=True))
        kinds = {each.name: "constexpr" if each.is_constexpr else kind_of(value) for each, value in named}
        constants = {each.name: value for each, value in named if each.is_constexpr}
        aligned = {(each.num,): [["tt.divisibility", 16]] for each, value in named if isinstance(value, torch.Tensor) or (
            type(value) is int and not value % 16 and not each.is_constexpr and not each.do_not_specialize)}
        key = (kernel.__name__, str(kinds), str(constants))
        if key not in compiled:
            source = triton.compiler.ASTSource(fn=kernel, signature=kinds, constexprs=constants, attrs=aligned)
            target = triton.backends.compiler.GPUTarget("cuda", capability, 32)
            compiled[key] = triton.compile(source, target=target, options=options)
    for (name, _, _), binary in compiled.items():
        assert binary.metadata.shared <= LEAST_SHARED, name
        assert stack_of(binary.asm["cubin"], folder) == 0, name
    return {name for name, _, _ in compiled}


def kind_of(value: Any) -> str:
    """The name of an argument's type in Triton."""
    if isinstance(value, torch.Tensor):
        return {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64",
                torch.int32: "*i32", torch.uint8: "*u8"}[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def stack_of(binary: bytes, folder: Path) -> int:
    """Bytes of the stack of a compiled kernel, to which registers spill."""
    path = folder / "kernel.cubin"
    path.write_bytes(binary)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    shown = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(shown.partition("STACK:")[2].split()[0])
