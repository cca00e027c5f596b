"""The documentation: its commands and its Python run as they are written, its pages build and ask no other server.

A third of the commands is composed by default, and the first ones of the README are run. The slow tests do both for all.
"""

import dataclasses
import fcntl
import html
import importlib.util
import json
import os
import re
import runpy
import shutil
from pathlib import Path

import pytest

from dflash_mcmc.components import GROUPS, registered
from dflash_mcmc.config import command as cli
from dflash_mcmc.config.schema import PACKAGE, Job
from dflash_mcmc.train import recipe
from tests import pages, processes
from tests.cases import quick
from tests.conftest import ROOT
from tests.pages import ADDED, AFTER_FETCHING, NEEDS_GPU, NEEDS_VLLM, PAGES, README
from tests.report import chromium

ALL = pages.commands(*PAGES)
PLAIN = pages.plain(ALL)
OF_THE_README = pages.plain(pages.commands(README))
ELSEWHERE = [line for line in PLAIN if line not in OF_THE_README]
FROM_NOTHING = {part.split()[2]: part for line in reversed(PLAIN) for part in line.split(" && ")
                if part.startswith("python -m ")}.values()
"""The first command of each program: it runs in a process that has imported nothing."""
RESULTS = pages.results(*PAGES)
ON_GPUS = pages.marked(ALL, NEEDS_GPU)
FETCHED = pages.marked(ALL, AFTER_FETCHING)
WITH_VLLM = pages.marked(ALL, NEEDS_VLLM)

SMOLLM2 = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30,
           "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536, "vocab_size": 49152,
           "max_position_embeddings": 8192, "tie_word_embeddings": True, "dtype": "bfloat16", "eos_token_id": 2}


@pytest.fixture(scope="module")
def real_data(tmp_path_factory) -> dict[str, str]:
    """A checkpoint and two files, as a reader has: the embedded checkpoint, and as many rows as the benchmarks have."""
    folder = tmp_path_factory.mktemp("data")
    row = {"problem": "What is 2+3?", "answer": "5", "level": 1, "subject": "Algebra", "solution": ""}
    (folder / "math.jsonl").write_text("".join(json.dumps({**row, "unique_id": f"{n}"}) + "\n" for n in range(500)))
    (folder / "gsm.jsonl").write_text(1319 * (json.dumps({"question": "What is 2+3?", "answer": "#### 5"}) + "\n"))
    (folder / "own.jsonl").write_text(2 * (json.dumps({"question": "What is 2+3?", "answer": "5"}) + "\n"))
    (folder / "prompts.jsonl").write_text('{"question": "What is 2+3?"}\n')
    checkpoint = shutil.copytree(PACKAGE / "assets/tiny", folder / "checkpoint")
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))  # room for 1024 tokens
    files = {"MATH500": "math", "GSM8K": "gsm", "QUESTIONS": "own"}
    return {"CHECKPOINT": str(checkpoint), **{name: str(folder / f"{file}.jsonl") for name, file in files.items()}}


def composed(command: str, folder: Path, **environment: str) -> list[Job]:
    """The jobs of each `python -m dflash_mcmc ...` of a line; what else it starts exists."""
    jobs = []
    for part in command.split(" && "):
        if "-m dflash_mcmc " in part:
            overrides = pages.arguments("python " + part.partition("-m dflash_mcmc ")[2], folder, **environment)
            cli.prepare()
            jobs += cli.check_command(overrides).jobs
        elif part.startswith("python -m dflash_mcmc.train "):
            draft, *overrides = pages.arguments(part, folder)[2:]
            assert recipe.compose(draft.removeprefix("draft="), overrides)
        elif part.startswith("python -m "):
            assert importlib.util.find_spec(part.split()[2])
        else:
            assert part.startswith(("echo ", "mkdir ", "printf "))
    return jobs


@pytest.mark.parametrize("command", quick(ELSEWHERE, *ELSEWHERE[1::15]))
def test_command_composes(command, tmp_path, monkeypatch, real_data):
    monkeypatch.chdir(tmp_path)
    composed(command, tmp_path, **real_data)


@pytest.mark.parametrize("command", quick(PLAIN, OF_THE_README[1]))
def test_command_prints_what_its_page_shows(command, tmp_path, real_data):
    printed = ""
    for part in command.split(" && "):
        done = (pages.shell if part in FROM_NOTHING else pages.run)(part, tmp_path, **real_data)
        assert done.returncode == 0, done.stderr[-2000:]
        printed += done.stdout
    for said in RESULTS[command]:
        assert pages.absent(said, printed) == [], printed[-3000:]


def test_every_command_has_its_result_beside_it():
    assert [command for command, said in RESULTS.items() if not said] == []
    assert RESULTS.keys() == set(PLAIN)


def test_a_result_is_compared():
    """By the lines' order, texts and numbers. Wrong ones are found."""
    table = "| condition   |   correct |   accuracy |   avg time (s) |\n|---|---|\n| ps | 44 | 68.8 % | 5.28 |\n1,234 tokens"
    for said in ("| condition | correct | ...\n| ps | 44 | 68.8 % | ...", "| ps | 40 | 63 % | ...\n1200 tokens", "...tokens"):
        assert pages.absent(said, table) == []
    for said in ("| ps | 0 | 0.0 % | ...", "| greedy | 44 | ...", "1,234 tokens\n| ps | 44 | ...", "| ps | 44 |"):
        assert pages.absent(said, table) != []


@pytest.mark.parametrize("command", quick(ON_GPUS, ON_GPUS[0]))
def test_command_for_a_gpu_composes(command, tmp_path, monkeypatch, real_data):
    monkeypatch.chdir(Path(real_data["MATH500"]).parent)
    jobs = composed(command, tmp_path)
    if "experiment=guided_power_sampling" in command:
        for job in jobs:
            assert (job.config.model.path, job.config.dataset.max_new_tokens) == ("Qwen/Qwen3-4B", 1024)
        sampler = next(job.config.sampler for job in jobs if job.choices["sampler"] == "power_mh")
        assert (sampler.num_blocks, sampler.num_steps, sampler.alpha) == (16, 2, 4.0)
        for blend in (job.config.blend for job in jobs if job.choices["blend"] == "layer"):
            assert (blend.beta, blend.layer) == (0.05, -3)
    elif "accelerate" in command:
        assert command.startswith("accelerate launch --multi_gpu --num_processes 8 -m dflash_mcmc ")
        assert [job.config.num_chains for job in jobs] == [8]
    elif "experiment=sampled_verify" in command:
        assert [job.config.num_chains * job.config.dataset.limit for job in jobs] == [150]
    elif "draft=eagle3" in command:
        assert [(job.choices["draft"], job.config.draft.num_drafted) for job in jobs] == [("eagle3", 5)]
    elif ".drafts check" in command:
        assert "model=qwen3_4b draft=qwen3_4b dataset=math500" in command
    else:
        assert command == "python -m dflash_mcmc.train draft=dflash model=qwen3_4b prompts.path=prompts.jsonl"


@pytest.mark.parametrize("command", quick(WITH_VLLM, WITH_VLLM[0]))
def test_command_with_vllm_composes(command, tmp_path, monkeypatch, real_data):
    monkeypatch.chdir(tmp_path)
    assert composed(command, tmp_path, **real_data)[-1].choices["engine"] == "vllm"


@pytest.fixture(scope="module")
def fetched(tmp_path_factory) -> Path:
    """A folder with a checkpoint where `make smollm2` puts SmolLM2: its shape, with the embedded model's tokenizer."""
    folder = tmp_path_factory.mktemp("fetched")
    model = folder / "outputs/models/smollm2"
    shutil.copytree(PACKAGE / "assets/tiny", model, ignore=shutil.ignore_patterns("*.safetensors"))
    (model / "config.json").write_text(json.dumps(SMOLLM2))
    (folder / "dflash_mcmc").symlink_to(PACKAGE)
    (folder / "own.jsonl").write_text(2 * (json.dumps({"question": "What is 2+3?", "answer": "5"}) + "\n"))
    (folder / "prompts.jsonl").write_text(20 * '{"question": "What is 2+3?"}\n')
    return folder


@pytest.mark.parametrize("command", quick(FETCHED, FETCHED[0]))
def test_command_after_fetching_composes(command, fetched, monkeypatch, real_data):
    monkeypatch.chdir(fetched)
    jobs = composed(command, fetched, **real_data)
    assert all(job.config.model.path == "outputs/models/smollm2" for job in jobs)


def test_make_has_the_targets():
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    text = "\n".join(page.read_text() for page in PAGES)
    assert {word for word in re.findall(r"`make ([a-z0-9-]+)", text)} <= set(targets)
    assert {line.split()[1] for line in ALL if line.startswith("make ")} <= set(targets)


def scripts(page: Path) -> str:
    """The page's Python but for the files that it shows, as one script."""
    return "\n".join(block for block in pages.blocks(page, "python") if not block.startswith("# "))


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=[pytest.mark.slow] * (page.name == "python.md"), id=pages.name_of(page))
    for page in PAGES if page != README and scripts(page)])
def test_python_prints_what_its_page_shows(page, tmp_path):
    done = processes.run(["-c", scripts(page)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    said = "".join(output for _, output in pages.shown("python", page))
    assert pages.absent(said, done.stdout) == [], done.stdout


def test_the_python_of_the_readme_prints_what_the_page_shows(tmp_path):
    """All answers are right. Log p, counts and now and then a token can differ between processors, by rounding."""
    shown = README.read_text().partition("It prints four answers:\n\n```output\n")[2].partition("```")[0]
    done = processes.run(["-c", scripts(README)], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    texts, expected = ([line.partition("  log p")[0] for line in lines.splitlines()] for lines in (done.stdout, shown))
    assert len(texts) == len(expected) == 4
    assert sum(map(str.__eq__, texts, expected)) >= 3
    numbers = re.search(r"has (\d+) shells. The number grows to (\d+) times", scripts(README))
    assert all(rf"\boxed{{{int(numbers[1]) * int(numbers[2])}}}" in text for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sampler", "dataset", "probe", "draft"])
def test_adding_a_component(kind, tmp_path):
    """The two files of the page, in the places that they name, in a copy of the project."""
    page = ROOT / f"docs/howto/add-a-{kind}.md"
    for name in ("dflash_mcmc", "conf", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    written = []
    for block in (*pages.blocks(page, "python"), *pages.blocks(page, "yaml")):
        place, _, text = block.partition("\n")
        (tmp_path / place.removeprefix("# ")).write_text(text)
        written.append(place)
    assert len(written) == 2
    name = re.search(rf'register\("{kind}", "(\w+)"\)', page.read_text())[1]
    environment = {"PYTHONPATH": str(tmp_path)}
    run, test = pages.marked(pages.commands(page), ADDED)
    for part in (*run.split(" && "), test, "python -m pytest tests/test_names.py -k component"):
        done = pages.run(part, tmp_path, **environment)
        assert done.returncode == 0, done.stdout + done.stderr
    listed = pages.run(f"python -m dflash_mcmc --help {kind}", tmp_path, **environment)
    assert f"{kind}/{name}: " in listed.stdout


def test_pictures_are_made_by_the_commands_of_their_pages():
    made = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]
    assert {f"{picture.name}.png" for picture in made} == {file.name for file in (ROOT / "docs/assets").glob("*.png")}
    for picture in made:
        page = ROOT / "docs" / picture.page
        assert f"](../assets/{picture.name}.png)" in page.read_text()
        assert set(picture.commands) <= set(pages.commands(page))


@pytest.fixture(scope="session")
def site(tmp_path_factory) -> Path:
    """The built site. A warning is an error. Tests that run side by side share it: whoever is first builds it."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with open(shared / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "site").is_dir():
            made = shared / "site.unchecked"
            done = processes.run(["-m", "mkdocs", "build", "--strict", "--site-dir", made], ROOT)
            assert done.returncode == 0, done.stdout + done.stderr
            made.rename(shared / "site")
    return shared / "site"


@pytest.mark.slow
def test_the_site_asks_no_other_server(site):
    tags = [tag for page in site.rglob("*.html")
            for tag in re.findall(r"<(?:script|link|img|iframe)\b[^>]*>", page.read_text())]
    assert len(tags) > 100
    assert not [tag for tag in tags if re.search(r"""(?:src|href)=["']?(?:https?:)?//""", tag)]
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()[\s\"']*(?:https?:)?//", style.read_text())


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "docs/notebook").glob("*.md"))], ids=pages.name_of)
def test_code_has_lines_of_80_characters(page):
    """So many fit beside both columns of a page in a window of 1280 pixels (the next test)."""
    fenced = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [line for block in fenced for line in block.splitlines() if len(line) > 80] == []


LOOK = """
const root = page.documentElement, style = element => view.getComputedStyle(element);
const wide = element => element.scrollWidth > element.clientWidth + 1;
const scrolls = element => element.parentElement
  && (style(element.parentElement).overflowX !== "visible" || scrolls(element.parentElement));
const broken = element => {
  element.style.whiteSpace = "pre";
  const found = wide(element);
  element.style.whiteSpace = "";
  return found;
};
const code = [...page.querySelectorAll("article pre > code")];
return {
  width: view.innerWidth,
  beyond: [...page.querySelectorAll("article *")].filter(e => e.getBoundingClientRect().width > 1
    && e.getBoundingClientRect().right > root.clientWidth + 1 && !scrolls(e)).map(e => e.outerHTML.slice(0, 80)),
  sideways: root.scrollWidth - root.clientWidth,
  scrolled: code.filter(e => wide(e) && !e.closest(".language-output")).map(e => e.textContent.slice(0, 80)),
  outputs: page.querySelectorAll("article .language-output").length,
  torn: [...page.querySelectorAll("article table:not([class]) code")].filter(e => {
    const range = page.createRange(), letter = /[A-Za-z]/, places = [];
    for (const text of e.childNodes) for (let at = 1; at < (text.data || "").length; at++) places.push([text, at]);
    return places.some(([text, at]) => {
      const top = place => { range.setStart(text, place); range.setEnd(text, place + 1);
        return range.getBoundingClientRect().top; };
      return letter.test(text.data[at - 1]) && letter.test(text.data[at]) && top(at) > top(at - 1) + 4;
    });
  }).map(e => e.textContent.slice(0, 80)),
  wrapped: [...page.querySelectorAll("article .language-output pre > code")]
    .filter(e => style(e).whiteSpace !== "pre").length,
  broken: code.filter(broken).map(e => e.textContent.slice(0, 80)),
  tables: page.querySelectorAll("article table:not([class])").length,
  cut: [...page.querySelectorAll("article table:not([class])")].filter(e => !e.closest(".md-typeset__scrollwrap")).length,
};
"""


@pytest.mark.slow
def test_every_page_fits_its_window(site, tmp_path):
    """Nothing is beyond the right edge but in tables and outputs, which scroll. Code breaks on a narrow screen alone.

    The rows of a table that a program prints stay lines, and no word of code in a cell is torn.
    """
    chromium.needed()
    files = [file for file in sorted(site.rglob("*.html")) if file.name != "404.html"]
    written = {f"{site.as_uri()}/{page.relative_to(ROOT / 'docs').with_suffix('.html')}" for page in PAGES if page != README}
    for width, seen in chromium.visit(files, tmp_path, LOOK, [1280, 400]).items():
        assert len(seen) == len(files) > 60
        assert sum(found["tables"] for found in seen.values()) > 100
        assert sum(found["outputs"] for found in seen.values()) > 50
        for address, found in seen.items():
            assert (found["width"], found["beyond"], found["sideways"], found["scrolled"]) == (width, [], 0, []), address
            assert (found["cut"], found["torn"], found["wrapped"]) == (0, [], 0), address
            assert width < 1280 or address not in written or found["broken"] == [], address


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_every_component_is_in_the_reference(site, group):
    text = html.unescape((site / f"reference/options/{group}.html").read_text())
    for name, component in registered(group).items():
        assert f"{group}={name}" in text
        for field in dataclasses.fields(component.cls):
            assert f"<code>{field.name}</code>" in text


@pytest.mark.slow
def test_every_field_of_a_run_is_in_the_reference(site):
    text = html.unescape((site / "reference/options/run.html").read_text())
    assert "No fields." not in text
    assert "one of 'prompt' or null" in text
    for name in ("vote", "vote.power", "vote.adaptive", "assumed"):
        assert re.search(rf"<h2[^>]*>{name}<", text)
    for name in ("aggregate", "num_chains", "alpha", "confidence", "prompt_length"):
        assert f"<code>{name}</code>" in text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["2026-12", "2026-11", "2026-11-16"])
def test_each_entry_of_the_notebook_begins_with_its_conclusion(site, name):
    page = ROOT / "docs" / "notebook" / f"{name}.md"
    entries = re.findall(r"^## (.+)\n\n\*\*(2026-\d\d-\d\d)\.\*\* (.+)$", page.read_text(), flags=re.MULTILINE)
    assert len(entries) == page.read_text().count("\n## ")
    assert [date for _, date, _ in entries] == sorted((date for _, date, _ in entries), reverse=True)
    assert all(html.escape(title, quote=False) in (site / f"notebook/{name}.html").read_text() for title, _, _ in entries)


@pytest.mark.slow
def test_every_module_is_on_the_page_of_files(site):
    text = (site / "reference/package.html").read_text()
    for file in PACKAGE.rglob("*.py"):
        assert file.name == "__init__.py" or f"<code>{file.name}</code>" in text


def test_pages_name_no_release_that_there_is_not():
    for page in PAGES:
        assert not re.search(r"pip install '?dflash[-_]mcmc", page.read_text()), page


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 200


def test_the_two_commands_of_the_readme_come_first_and_ci_runs_them():
    assert pages.commands(README)[:2] == ["make demo", "make test"]
    ci = (ROOT / ".ci/run").read_text().splitlines()
    assert all(command in ci for command in ("make demo", "make test"))


def test_the_python_of_the_readme_has_ten_lines_or_fewer():
    (block,) = pages.blocks(README, "python")
    assert len([line for line in block.splitlines() if line]) <= 10


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "launchers/README.md"])
def test_links_lead_to_files(name):
    page = ROOT / name
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    assert links or name != "README.md"
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link
