"""Writes what `draw.py` needs: the crafted cases of `verify cases`, whose models serve here, and prompts.

    python prepare.py FOLDER      # a new one; GGUF files need the package gguf (pip install -e '.[real]')
"""

import json
import subprocess
import sys
from pathlib import Path

from transformers import AutoTokenizer

import dflash_mcmc as dm

if __name__ == "__main__":
    place = Path(sys.argv[1])
    subprocess.run([sys.executable, "-m", "dflash_mcmc.verify", "cases", str(place)], check=True)
    tokenizer = AutoTokenizer.from_pretrained(place / "target")
    problems = Path(dm.component("model", "tiny").path).parent / "arith.jsonl"
    asked = [json.loads(line)["question"] for line in problems.read_text().splitlines()[:64]]
    texts = [tokenizer.apply_chat_template([{"role": "user", "content": each}], tokenize=False, add_generation_prompt=True)
             for each in asked]
    (place / "prompts.json").write_text(json.dumps([tokenizer.encode(text, add_special_tokens=False) for text in texts]))
