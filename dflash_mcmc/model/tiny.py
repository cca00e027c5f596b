"""The architecture and the tokenizer of the embedded target.

`python -m dflash_mcmc.train` trains the target, and `model=tiny` loads the result.

The target is a `Qwen3ForCausalLM` of eight layers with a byte-level tokenizer in which every digit is a token. It has the chat
template, the two stop ids and the unused vocabulary rows of Qwen3. Code that works on it therefore also works on Qwen3-4B.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB_SIZE = 512
TOKENIZER_SIZE = 500
"""Upper bound on the ids that have a token. The rows above are padding and are never drawn, like Qwen3's from 151,669 on."""

_END_OF_TEXT, _TURN_START, _TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIAL_TOKENS = (_END_OF_TEXT, _TURN_START, _TURN_END)
_THINK_TOKENS = ("<think>", "</think>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false -%}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif -%}"
    "{%- endif -%}"
)


def build_config() -> Qwen3Config:
    """1.65 M parameters in 8 layers of width 128."""
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=VOCAB_SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=8, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=1024, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}, attention_dropout=0.0, use_cache=True,
    )


def build_model(seed: int) -> Qwen3ForCausalLM:
    """A freshly initialised model, float32."""
    import torch
    from transformers import Qwen3ForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(build_config())


def build_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the texts; a digit never merges with anything, as in Qwen3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_SIZE - len(_SPECIAL_TOKENS) - len(_THINK_TOKENS), show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.add_tokens(list(_THINK_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_TURN_END, pad_token=_END_OF_TEXT)
    fast.chat_template = CHAT_TEMPLATE
    return fast


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids of end of turn and end of text. Qwen3's generation_config names both, too."""
    return cast(list[int], tokenizer.convert_tokens_to_ids([_TURN_END, _END_OF_TEXT]))
