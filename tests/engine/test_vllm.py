"""engine=vllm without vLLM: identity, what it refuses, its settings. What vLLM draws is in tests/vllm."""

import dataclasses
import importlib.util
import math
import re
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch

from dflash_mcmc.__main__ import main
from dflash_mcmc.config.command import check_command
from dflash_mcmc.config.identity import identity_of, run_folder
from dflash_mcmc.engine.vllm import core
from dflash_mcmc.engine.vllm.core import CONFIG, arguments
from dflash_mcmc.errors import UserError
from dflash_mcmc.runner import plan
from tests.refusals import refused

SMALL = ("engine=vllm", "sampler=greedy", "hardware.device=cpu")


def test_the_engine_and_what_can_change_a_number_are_in_the_identity(make_config):
    config = make_config(*SMALL)
    identity = identity_of(config)
    assert identity["engine"] == "vllm"
    assert {key for key in identity if key.startswith("engine.")} == {"engine.quantization", "engine.kv_cache_dtype",
                                                                      "engine.float32_head"}
    assert config.label() == "greedy_vllm"
    assert "-vllm-" in str(run_folder(config, "0"))
    for override in ("engine.tensor_parallel_size=2", "engine.max_model_len=900", "engine.gpu_memory_utilization=0.5"):
        assert identity_of(make_config(*SMALL, override)) == identity, override
    assert identity_of(make_config(*SMALL, "engine.quantization=fp8")) != identity


REFUSED = {
    ("decoder=speculative_match", "draft=ngram"): "decoder: given 'speculative_match'; allowed: plain with engine=vllm",
    ("blend=draft", "draft=tiny"): "blend: given 'draft'; allowed: one without a draft with engine=vllm, or engine=slots",
    ("sampler=draft_mh", "draft=tiny"): "sampler: given 'draft_mh'; allowed: one without a draft with engine=vllm, or",
    ("probe=layer_rank",): "probe: given 'layer_rank'; allowed: none with engine=vllm, or engine=slots",
    ("engine.tensor_parallel_size=0",): "engine.tensor_parallel_size: given 0; allowed: a whole number >= 1",
    ("engine.cuda_graphs=true",): "engine.cuda_graphs: unknown field",
}


@pytest.mark.parametrize("overrides", REFUSED, ids=" ".join)
def test_refuses_in_one_line(make_config, overrides):
    with refused(start=REFUSED[overrides]):
        make_config("engine=vllm", *overrides)


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_missing_package_is_one_line_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(core, "prepare_environment", lambda: None)  # it is that of the whole process
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "dataset.limit=1", "tracker=none", f"paths.outputs={tmp_path}"])
    assert capsys.readouterr().err.strip().splitlines()[-1] == f"error: {core.MISSING}"
    assert not list(tmp_path.iterdir())


def test_a_sequence_that_is_too_long_is_refused(make_config):
    config = make_config(*SMALL, "engine.max_model_len=100", "dataset.max_new_tokens=90")
    with pytest.raises(UserError, match=r"engine.max_model_len: given 100; allowed: null, or at least 110: 20 tokens of"):
        config.engine.start(config, config.engine.load(config, "cpu"), 20, 1)


def test_the_target_has_the_stop_ids_and_ids_of_the_loaded_model(make_config):
    config = make_config(*SMALL)
    target, model = config.engine.load(config, "cpu"), config.model.load("cpu")
    assert target.stop_ids == model.stop_ids
    assert list(target.forbidden) == model.forbidden.nonzero()[:, 0].tolist()
    assert (target.vocab_size, target.max_positions) == (model.vocab_size, model.max_positions)
    tokens = model.encode("1 + 1")
    assert target.encode("1 + 1").tolist() == tokens.tolist()
    assert target.decode(tokens) == model.decode(tokens)


@pytest.mark.parametrize("experiment", ["guided_power_sampling", "power_sampling_paper"])
def test_the_experiments_compose_and_are_estimated(experiment):
    command = check_command([f"experiment={experiment}", "engine=vllm", "dry_run=true", "condition=ps"])
    assert "ps_vllm" in plan.table(command)


def test_a_dry_run_prints_the_plan_and_refuses_too_little_memory(make_config):
    config, shared = (make_config(*SMALL, "hardware.num_slots=4", f"engine.pipeline_parallel_size={n}") for n in (1, 2))
    line = config.engine.memory_note(config)
    assert "keys and values of 4 requests, " in line
    assert line in plan.table(check_command([*SMALL, "dry_run=true", "hardware.num_slots=4"]))
    (keys, weights), (of_keys, of_weights) = (
        map(float, re.search(r"requests, (.*?) GB .*; weights (.*?) GB", one.engine.memory_note(one)).groups())
        for one in (config, shared))
    assert (keys, weights) == (pytest.approx(2 * of_keys, rel=0.01), pytest.approx(2 * of_weights, rel=0.01))
    longest = -(-(config.assumed.prompt_length + config.dataset.max_new_tokens) // 32) * 32
    each = config.model.load("cpu").cache_shape.token_bytes()
    free = make_config(*SMALL, "hardware.num_slots=null", f"hardware.memory_gb={3.5 * longest * each / 1e9}")
    assert "keys and values of 3 requests, " in free.engine.memory_note(free)
    with pytest.raises(UserError, match=r"hardware.memory_gb: given 0.0001; allowed: at least 0.00\d+, the keys and values"):
        plan.table(check_command([*SMALL, "dry_run=true", "hardware.memory_gb=0.0001"]))


def test_fields_of_the_same_name_reach_vllm_unchanged(make_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    given = {"pipeline_parallel_size": 3, "tensor_parallel_size": 2, "enable_expert_parallel": True, "kv_cache_dtype":
             "fp8_e5m2", "quantization": "fp8", "gpu_memory_utilization": 0.55, "block_size": 64, "enforce_eager": True}
    config = make_config("engine=vllm", "sampler=greedy", *(f"engine.{name}={value}" for name, value in given.items()))
    target = config.engine.load(config, "cpu")._replace(device="cuda:0")
    arguments = core.settings(config.engine, config, target, 500, 8)
    assert {name: arguments[name] for name in given} == given
    assert arguments["device_ids"] == [0, 1, 2, 3, 4, 5]
    names = {field.name for field in dataclasses.fields(config.engine)}
    assert names - set(given) == {"max_model_len", "float32_head"}  # a new field is tested here too


@pytest.mark.parametrize(("chains", "requests", "width", "expected"), [(256, 127.9, 1, 127), (20, 127.9, 1, 20),
                                                                       (51, 127.9, 5, 25), (256, 0.7, 1, 1),
                                                                       (256, math.inf, 1, 256)])
def test_chains_that_fit_at_full_length(chains, requests, width, expected):
    assert core.fitting(chains, requests, width) == expected


@pytest.mark.parametrize(("slots", "expected"), [("null", 5), ("9", 9)])
def test_the_memory_chooses_the_number_of_chains_by_default(make_config, monkeypatch, slots, expected):
    monkeypatch.setattr(core, "shared", lambda settings: SimpleNamespace(arguments=settings, capacity=lambda: 5.5,
                                                                       stop_at=lambda stops: None))
    config = make_config(*SMALL, f"hardware.num_slots={slots}")
    engine = config.engine.start(config, config.engine.load(config, "cpu"), 20, 40)
    assert engine._num_chains == expected
    assert engine._core.arguments["max_num_seqs"] == min(40, 9 if slots == "9" else 256)


@pytest.mark.parametrize(("slots", "total", "width", "expected"), [(32, 100, 1, 32), (32, 3, 1, 3), (32, 100, 5, 6),
                                                                   (2, 9, 5, 1), (None, 999, 1, 256)])
def test_chains_in_progress(slots, total, width, expected):
    assert core.chains_at_once(slots, total, width) == expected


def test_processes_share_the_gpus_of_a_machine(make_config, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = make_config("engine=vllm", "sampler=greedy", "engine.tensor_parallel_size=2", "model.dtype=bfloat16")
    target = config.engine.load(config, "cpu")._replace(device="cuda:1")
    settings = core.settings(config.engine, config, target, 500, 8)
    assert settings["device_ids"] == [2, 3]
    assert settings["kv_cache_memory_bytes"] is None  # vLLM takes what gpu_memory_utilization leaves
    assert settings["hf_overrides"] == {"head_dtype": "float32"}
    assert (settings["tensor_parallel_size"], settings["gpu_memory_utilization"]) == (2, 0.9)
    assert not settings["trust_remote_code"]
    assert settings["generation_config"] == "vllm"
    assert settings["additional_config"][CONFIG]["forbidden"] == list(target.forbidden)


def test_a_group_that_the_machine_has_not_is_refused(make_config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    config = make_config("engine=vllm", "sampler=greedy", "engine.tensor_parallel_size=3", "model.dtype=bfloat16")
    assert config.engine.num_devices() == 3
    target = config.engine.load(config, "cpu")._replace(device="cuda:1")
    with pytest.raises(UserError, match=r"given 3; allowed: at most 2 for process 1 of this machine, which has 4 GPUs"):
        core.settings(config.engine, config, target, 500, 8)


def test_the_default_on_a_cpu_is_what_the_chains_need(make_config, monkeypatch):
    """Twice all requests at full length in whole blocks; a share of the free memory where that is less."""
    def found(*overrides, length=500, requests=8):
        config = make_config(*SMALL, *overrides)
        target = config.engine.load(config, "cpu")
        return core.settings(config.engine, config, target, length, requests)["kv_cache_memory_bytes"]

    monkeypatch.setattr(core.machine, "free_memory", lambda: 10**9)
    each = found(length=32, requests=1) // (2 * 32)
    assert each == make_config(*SMALL).model.load("cpu").cache_shape.token_bytes()
    assert found() == 2 * 8 * 512 * each
    assert found("engine.block_size=64", length=65, requests=1) == 2 * 128 * each
    assert found("engine.pipeline_parallel_size=2") == found() // 2
    assert found(requests=10**6) == 250_000_000
    assert found("hardware.memory_gb=0.25") == 250_000_000


def test_whole_experts_are_refused_on_a_cpu(make_config):
    """vLLM's kernel for experts on a CPU does not look at the map of experts, and reads beyond the weights."""
    config = make_config(*SMALL, "engine.enable_expert_parallel=true", "engine.tensor_parallel_size=2")
    target = config.engine.load(config, "cpu")
    with pytest.raises(UserError, match=r"engine.enable_expert_parallel: given True; allowed: false on a CPU, where vLLM"):
        core.settings(config.engine, config, target, 500, 8)


def test_a_blend_becomes_a_model_class_of_its_families(make_config):
    config = make_config(*SMALL, "blend=layer", "blend.layer=-2")
    target = config.engine.load(config, "cpu")
    settings = core.settings(config.engine, config, target, 500, 8)
    assert settings["hf_overrides"] == {"architectures": ["DflashMcmcQwen3ForCausalLM"]}
    assert (settings["enforce_eager"], "device_ids" in settings) == (True, False)  # on a CPU
    assert settings["additional_config"][CONFIG]["blend"] == {
        "name": "layer", "beta": config.blend.beta, "layer": -2, "norm": "none", "direction": "layer"}
    target.config.architectures = ["GPT2LMHeadModel"]
    with pytest.raises(UserError, match=r"model.path: given 'GPT2LMHeadModel'; allowed: a checkpoint of LlamaForCausalLM"):
        core.settings(config.engine, config, target, 500, 8)


def test_equal_settings_share_an_engine(monkeypatch):
    class Engine:
        def __init__(self, settings):
            self.arguments, self.closed = settings, False

        def close(self):
            self.closed = True

    monkeypatch.setattr(core, "VllmCore", Engine)
    first = core.shared(arguments("folder", "float32", 100, 4, ()))
    assert core.shared(arguments("folder", "float32", 100, 4, ())) is first
    other = core.shared(arguments("folder", "float32", 200, 4, ()))
    assert first.closed
    assert other is not first
    core.close_shared()
    assert other.closed


class FailingEngine:
    """Stands in for vLLM's engine, whose step raises."""

    def __init__(self, error: Exception, codes: Sequence[int | None] = ()):
        self.error, self.closed = error, False
        workers = [SimpleNamespace(proc=SimpleNamespace(exitcode=code)) for code in codes]
        self.engine_core = SimpleNamespace(shutdown=self.shutdown, engine_core=SimpleNamespace(
            model_executor=SimpleNamespace(workers=workers, is_failed=bool(codes))))

    def step(self):
        raise self.error

    def shutdown(self):
        self.closed = True
        raise RuntimeError("what has failed may fail to close")

    def abort_request(self, numbers):
        raise AssertionError("nothing is left to abort")


@pytest.mark.parametrize(("error", "codes", "line"), [
    (RuntimeError("cancelled"), (-15, -9), "worker 1 of 2 of vLLM has ended with exit code -9"),
    (TimeoutError("RPC call to sample_tokens timed out."), (),
     "a worker of vLLM has not answered for 300 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)"),
    (ValueError("two\nlines"), (), "vLLM has failed: ValueError: two lines")], ids=["dead", "hangs", "other"])
def test_a_failure_of_a_step_is_one_line_and_ends_the_engine(monkeypatch, error, codes, line):
    monkeypatch.setattr(core, "_patience", lambda: 300.0)
    failing = core.VllmCore.__new__(core.VllmCore)
    failing._has_failed = False
    engine = failing._engine = FailingEngine(error, codes)
    monkeypatch.setattr(core, "_shared", [failing])
    with pytest.raises(UserError) as raised:
        failing.step()
    assert str(raised.value) == f"engine: {line}; the same command draws what is missing"
    assert engine.closed
    assert not core._shared  # the next job starts another
    failing.abort([1, 2])  # a session does so when it ends
