"""Draws texts with engines that others wrote, for `python -m dflash_mcmc.verify`. Each engine has an environment of its own.

    python draw.py ENGINE MODEL PROMPTS.json TEXTS.jsonl [SETTING=VALUE]...

ENGINE is transformers, vllm, llama_cpp, ctranslate2, mlx or onnxruntime. MODEL is a folder, or a GGUF file for llama.cpp.
PROMPTS.json is a list of lists of token ids (prepare.py). Settings are fields of the engine's own request, and `repeats`,
`length`, `draft` (a model of the same kind), `dtype` (transformers), `speculation` (JSON for vLLM; `lookup` for
transformers), `batch` (transformers). Values are JSON or text.
"""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Draws = Iterator[list[int]]


def of_transformers(model: str, prompts: list[list[int]], length: int, settings: dict[str, Any]) -> Draws:
    """`generate`, alone, with `assistant_model` or with prompt lookup."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = settings.pop("dtype", "float32")

    def loaded(folder: str) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    target, more = loaded(model), {}
    if draft := settings.pop("draft", None):
        more["assistant_model"] = loaded(draft)
    if settings.pop("speculation", None) == "lookup":
        more["prompt_lookup_num_tokens"] = 4
    size, ends = settings.pop("batch", 1), target.generation_config.eos_token_id
    law = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    for number in range(0, len(prompts), size):
        torch.manual_seed(number)
        batch = prompts[number : number + size]
        longest = max(map(len, batch))
        ids = torch.tensor([[ends[0]] * (longest - len(each)) + each for each in batch])
        mask = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in batch])
        for answer in target.generate(ids, attention_mask=mask, max_new_tokens=length, **law, **more)[:, longest:].tolist():
            stops = [place for place, token in enumerate(answer) if token in ends]
            yield answer[: stops[0] + 1] if stops else answer


def of_vllm(model: str, prompts: list[list[int]], length: int, settings: dict[str, Any]) -> Draws:
    """The offline engine, alone or with `speculative_config`."""
    from vllm import LLM, SamplingParams

    engine = LLM(model=model, dtype="float32", max_model_len=512, max_num_seqs=32, seed=0, enforce_eager=True,
                 speculative_config=settings.pop("speculation", None))
    law = SamplingParams(max_tokens=length, **{"temperature": 1.0, **settings})
    for answer in engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], law, use_tqdm=False):
        yield list(answer.outputs[0].token_ids)


def of_llama_cpp(model: str, prompts: list[list[int]], length: int, settings: dict[str, Any]) -> Draws:
    """The server of llama.cpp (xllamacpp), alone or with a draft model."""
    import urllib.request
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.warmup, params.verbosity, params.cpuparams.n_threads = model, False, 0, 1
    params.n_parallel = settings.pop("parallel", 1)
    params.n_ctx = 2048 * params.n_parallel
    if draft := settings.pop("draft", None):
        params.speculative.draft.mparams.path = draft
        params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
    server = xllamacpp.Server(params)
    law = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "cache_prompt": False,
           "samplers": ["top_k", "top_p", "min_p", "temperature"], **settings}

    def draw(task: tuple[int, list[int]]) -> list[int]:
        body = {"prompt": task[1], "seed": task[0], "n_predict": length, "return_tokens": True, **law}
        request = urllib.request.Request(server.listening_address + "/completion", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]

    with ThreadPoolExecutor(params.n_parallel) as pool:
        yield from pool.map(draw, enumerate(prompts))


def of_ctranslate2(model: str, prompts: list[list[int]], length: int, settings: dict[str, Any]) -> Draws:
    """`Generator.generate_batch`."""
    import ctranslate2

    names = json.loads((Path(model) / "vocabulary.json").read_text())
    ctranslate2.set_random_seed(0)
    engine = ctranslate2.Generator(model, compute_type="float32", intra_threads=1)
    law = {"sampling_temperature": 1.0, "sampling_topk": 0, "return_end_token": True, **settings}
    for start in range(0, len(prompts), 16):
        texts = [[names[token] for token in prompt] for prompt in prompts[start:start + 16]]
        for answer in engine.generate_batch(texts, max_length=length, include_prompt_in_result=False, **law):
            yield list(answer.sequences_ids[0])


def of_mlx(model: str, prompts: list[list[int]], length: int, settings: dict[str, Any]) -> Draws:
    """`generate_step` of mlx-lm, or `speculative_generate_step` with a draft model, in float32."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step, speculative_generate_step
    from mlx_lm.sample_utils import make_sampler
    from mlx_lm.utils import load_model

    def loaded(folder: str) -> Any:
        network, _ = load_model(Path(folder))
        network.set_dtype(mx.float32)
        return network

    target, ends = loaded(model), json.loads((Path(model) / "generation_config.json").read_text())["eos_token_id"]
    draft = loaded(settings.pop("draft")) if "draft" in settings else None
    sampler = make_sampler(temp=settings.pop("temperature", 1.0), **settings)
    for number, prompt in enumerate(prompts):
        mx.random.seed(number)
        more = {"max_tokens": length, "sampler": sampler}
        steps = (generate_step(mx.array(prompt), target, **more) if draft is None else
                 speculative_generate_step(mx.array(prompt), target, draft, num_draft_tokens=3, **more))
        ids: list[int] = []
        while len(ids) < length and (not ids or ids[-1] not in ends):
            ids.append(int(next(steps)[0]))
        yield ids


def of_onnxruntime(model: str, prompts: list[list[int]], length: int, settings: dict[str, Any]) -> Draws:
    """`Generator` of onnxruntime-genai. MODEL is a folder that its `models.builder` has written."""
    import onnxruntime_genai

    network = onnxruntime_genai.Model(model)
    law = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, **settings}
    for number, prompt in enumerate(prompts):
        params, ids = onnxruntime_genai.GeneratorParams(network), []
        params.set_search_options(max_length=len(prompt) + length, random_seed=number, **law)
        generator = onnxruntime_genai.Generator(network, params)
        generator.append_tokens(prompt)
        while not generator.is_done():
            generator.generate_next_token()
            ids.append(int(generator.get_next_tokens()[0]))
        yield ids


ENGINES: dict[str, Callable[[str, list[list[int]], int, dict[str, Any]], Draws]] = {
    "transformers": of_transformers, "vllm": of_vllm, "llama_cpp": of_llama_cpp, "ctranslate2": of_ctranslate2, "mlx": of_mlx,
    "onnxruntime": of_onnxruntime}


def value_of(text: str) -> Any:
    """A setting's value: JSON, or the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":  # vLLM starts processes that import this file
    name, folder, questions, file, *given = sys.argv[1:]
    options = {key: value_of(text) for key, text in (one.split("=", 1) for one in given)}
    asked = json.loads(Path(questions).read_text()) * options.pop("repeats", 4)
    with open(file, "w") as lines:
        for prompt, ids in zip(asked, ENGINES[name](folder, asked, options.pop("length", 48), options), strict=True):
            lines.write(json.dumps({"prompt_ids": prompt, "ids": ids}) + "\n")
            lines.flush()
