"""Prompts for a draft's training, from files of GSM8K, MATH-500 and HumanEval, and from topics.

    python launchers/mixed_prompts.py DATA OUT [PART]

DATA has gsm8k/test.jsonl, math500/test.jsonl and humaneval/HumanEval.jsonl. OUT gets a question in each line. The part
`training` is a fixed mixture of problems that are not held out, each in every form of its kind, and then 24 held-out ones.
`unmeasured` is the same without the problems of the findings of Qwen2.5-Coder-0.5B: it begins GSM8K at row 200, has no
function of HumanEval, and asks for programs that solve the problems of GSM8K. `unmeasured_1_5b` leaves out the documents'
104 problems of MATH-500 too, shards 0 to 7 of 40.
`gsm8k`, `math`, `code` and `topics` are held-out problems alone, after four lines that a training needs; `text` has the
last two.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from dflash_mcmc.rng import Key

MATH = ("{}", "Can you solve the following math problem? {} Please reason step by step, and put your final answer within "
        "\\boxed{{}}.", "{}\nThink step by step. End with a line of the form: The answer is N.")
CODE = ("Complete the following Python function.\n\n{}", "Explain in plain words what this Python function does.\n\n{}")
PROGRAM = ("Write a Python function `solve()` that returns the answer to this problem.\n\n{}",)
TOPICS = (
    "photosynthesis", "the water cycle", "black holes", "the French Revolution", "compound interest",
    "how vaccines work", "plate tectonics", "the Roman Empire", "the stock market", "machine learning",
    "climate change", "the human heart", "baking bread", "learning to swim", "a healthy breakfast", "time management",
    "public speaking", "growing tomatoes", "the moon", "electric cars", "the internet", "recycling", "dinosaurs",
    "jazz music", "chess", "meditation", "the solar system", "world war one", "inflation", "DNA", "gravity",
    "volcanoes", "bees", "ocean currents", "renewable energy", "the printing press", "algebra", "probability",
    "poetry", "photography", "a first job interview", "saving money", "a trip to Japan", "teaching children to read",
    "city gardens", "the Great Wall of China", "sleep", "antibiotics", "magnets", "bridges", "the violin", "coffee",
    "whales", "hurricanes", "the Silk Road", "cryptography", "honesty", "friendship", "lighthouses", "a lost dog")
ABOUT = ("Explain {} to a beginner.", "Write a short story about {}.", "What are three interesting facts about {}?",
         "Give me some practical advice about {}.", "Write an email to a colleague about {}.")
FORMS = {"gsm8k": MATH, "math": MATH, "code": CODE, "topics": ABOUT}
TRAINED = {"gsm8k": 1200, "math": 400, "code": 124, "topics": 48}
"""Number of leading problems, functions and topics of each kind that are not held out."""
MEASURED = {"gsm8k": 200, "math": 0, "code": 124, "topics": 0}
"""Number of those that `unmeasured` and `unmeasured_1_5b` leave out."""


def problems(data: Path) -> dict[str, list[str]]:
    """The problems of each kind, in the order of their files."""
    def column(file: str, name: str) -> list[str]:
        return [json.loads(line)[name] for line in (data / file).read_text(encoding="utf-8").splitlines()]

    return {"gsm8k": column("gsm8k/test.jsonl", "question"), "math": column("math500/test.jsonl", "problem"),
            "code": column("humaneval/HumanEval.jsonl", "prompt"), "topics": list(TOPICS)}


def lines(data: Path, part: str) -> list[str]:
    """The prompts of a part."""
    found = problems(data)
    unmeasured = part.startswith("unmeasured")
    first, forms = (MEASURED, FORMS | {"gsm8k": MATH + PROGRAM}) if unmeasured else ({}, FORMS)
    training = [form.format(text) for kind, texts in found.items()
                for number, text in enumerate(texts[: TRAINED[kind]])
                if number >= first.get(kind, 0) and not (part == "unmeasured_1_5b" and kind == "math" and number % 40 < 8)
                for form in forms[kind]]
    held_out = {kind: _asked(texts[TRAINED[kind] :], kind, TRAINED[kind]) for kind, texts in found.items()}
    mixed = [training[n] for n in Key(0).fold_in("mixed prompts").uniforms(0, len(training)).argsort()]
    if part == "training" or unmeasured:
        return [*mixed, *held_out["gsm8k"][:8], *held_out["math"][:8], *held_out["code"][:4], *held_out["topics"][:4]]
    held_out["text"] = [*held_out["code"], *held_out["topics"]]
    return [*mixed[:4], *held_out[part]]


def _asked(texts: Sequence[str], kind: str, first: int) -> list[str]:
    """A topic in every form; any other problem in one form, which its number `first`, first + 1, ... chooses."""
    forms = FORMS[kind]
    if kind == "topics":
        return [form.format(text) for text in texts for form in forms]
    return [forms[number % len(forms)].format(text) for number, text in enumerate(texts, first)]


if __name__ == "__main__":
    folder, out, *rest = map(Path, sys.argv[1:])
    part = str(rest[0]) if rest else "training"
    out.write_text("".join(json.dumps({"question": text}) + "\n" for text in lines(folder, part)))
