"""Decode steps of fewer than eight rows with the bits of eight rows, in float32 on a CPU.

`of` tests on the machine that it runs on whether this holds: every linear layer and norm, then whole forwards at several
lengths of the keys, and the functions of a draw. All comparisons are of bits, with fixed random inputs. A norm that differs
keeps its own form. If anything else fails, there is no `FewRows`, and steps have eight rows. Whether the memory holds the
transposed weights is decided before, by `plan.plan`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from dflash_mcmc.inference import fused_norms, piecewise_product
from dflash_mcmc.inference import logits_processor as laws
from dflash_mcmc.inference.contiguous_cache import ContiguousCache
from dflash_mcmc.inference.fused_norms import Norm
from dflash_mcmc.inference.joint_product import JointProduct, linears, products
from dflash_mcmc.inference.piecewise_product import ROWS

if TYPE_CHECKING:
    from dflash_mcmc.inference.interface import Options
    from dflash_mcmc.inference.language_model import LanguageModel

_WIDTH_STEP = 64
"""Widths of layers are multiples of it. A vectorised function computes the rest of its elements by other instructions."""
_ATTENTION = "grouped"
_LENGTHS = (64, 128, 512)
"""Lengths of the keys in the comparison of whole forwards."""
_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple, FewRows | None]] = weakref.WeakKeyDictionary()


class FewRows:
    """The linear layers, the norms and the head of a model as products and operations of few rows.

    Args:
        products: a product for each linear layer of the decoder, and the layer's number in it.
        norms: the fused form of norms of the decoder.
        head: the product of the head.
        most: largest number of rows for which the bits have been compared.
    """

    def __init__(self, products: dict[torch.nn.Linear, tuple[JointProduct, int]], norms: dict[torch.nn.Module, Norm],
                 head: JointProduct, most: int):
        self._head, self.most, self._on = head, most, False
        self._joint = list(dict.fromkeys(joint for joint, _ in products.values()))
        self._forwards: dict[torch.nn.Module, Norm] = {
            **{layer: self._linear(layer, *product) for layer, product in products.items()},
            **{module: self._switched(norm, module.forward) for module, norm in norms.items()}}

    @property
    def num_bytes(self) -> int:
        """Bytes of the transposed weights."""
        return self._head.num_bytes + sum(joint.num_bytes for joint in self._joint)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """A context in which `step` can switch the model's layers and norms. Contexts of one model may be nested."""
        with ExitStack() as stack:
            for joint in (*self._joint, self._head):
                joint.refresh()
            for layer, forward in self._forwards.items():
                if "forward" not in layer.__dict__:
                    layer.__dict__["forward"] = forward
                    stack.callback(layer.__dict__.pop, "forward")
            yield

    @contextmanager
    def step(self, model: LanguageModel) -> Iterator[None]:
        """A context for forwards of at most `most` rows of one token, and for their logits."""
        self._on = True
        try:
            with model.multiplied_by(self._head.multiply):
                yield
        finally:
            self._on = False

    def is_current(self) -> bool:
        """Whether the model still has the weights of the products."""
        return all(joint.is_current() for joint in (*self._joint, self._head))

    def _linear(self, layer: torch.nn.Linear, joint: JointProduct, number: int) -> Norm:
        return self._switched(partial(joint.of_layer, number), lambda rows: linear(rows, layer.weight, layer.bias))

    def _switched(self, few: Norm, own: Norm) -> Norm:
        """`few` during a step of few rows, otherwise the module's own function."""
        return lambda rows: few(rows) if self._on else own(rows)


def asked_for(options: Options, num_slots: int, implementation: str, has_draft: bool) -> bool:
    """Whether an engine makes products of few rows, where the model and the machine allow it."""
    return options.few_rows and num_slots < ROWS and implementation == _ATTENTION and not has_draft


@torch.inference_mode()
def of(model: LanguageModel, most: int) -> FewRows | None:
    """The products for batches of at most `most` rows; None where the bits are not those of eight rows.

    Products of a model are kept as long as the model, and made again when its weights have changed. They are compared with the
    model's own forwards while no other thread uses the model.

    Args:
        most: 1 to 7.
    """
    known = _KNOWN.setdefault(model.decoder, {})
    key = (most, torch.get_num_threads())
    if key in known:
        found = known[key]
        if found is None or found.is_current():
            return found
    with model.turn.taken(nests=True):
        known.clear()
        known[key] = _found(model, most)
        return known[key]


def fits(model: LanguageModel) -> bool:
    """Whether the model is one that few rows are made for: float32 on a CPU, with linear layers of usual widths."""
    weights = [layer.weight for layer in linears(model.decoder)]
    return (model.device.type == "cpu" and model.dtype == torch.float32 and not model.has_experts
            and not model.recurrent_nets and bool(weights) and type(model.head) is torch.nn.Linear
            and all(weight.dtype == torch.float32 and not any(size % _WIDTH_STEP for size in weight.shape)
                    for weight in weights))


def num_bytes(model: LanguageModel) -> int:
    """Bytes of the transposed weights, which `of` makes."""
    return 4 * (model.vocab_size * model.config.hidden_size
                + sum(layer.weight.numel() for layer in linears(model.decoder)))


def _found(model: LanguageModel, most: int) -> FewRows | None:
    if not (fits(model) and _draws_agree(model.vocab_size, most)):
        return None
    layers = products(model.decoder, most)
    head = piecewise_product.find(model.head.weight, None, most)
    if layers is None or head is None:
        return None
    few = FewRows(layers, fused_norms.fused(model.decoder, most), JointProduct([model.head], head.piece), most)
    return few if all(_forwards_agree(few, model, length, most) for length in _lengths(model)) else None


def _lengths(model: LanguageModel) -> list[int]:
    limit = model.max_positions
    return [length for length in _LENGTHS if limit is None or length <= limit] or [_LENGTHS[0]]


def _forwards_agree(few: FewRows, model: LanguageModel, length: int, most: int) -> bool:
    """Whether hidden states and logits of few rows have the bits of eight, over random keys and values."""
    generator = torch.Generator().manual_seed(length)
    last = length if model.max_positions is None else min(length, model.max_positions)
    tokens = torch.randint(model.vocab_size, (ROWS, 1), generator=generator)
    positions = torch.randint(last // 2, last, (ROWS, 1), generator=generator)
    cache = ContiguousCache(model.cache_shape, ROWS, length)
    cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
    cache.values.copy_(torch.randn(cache.values.shape, generator=generator))
    expected = _forward(model, cache, tokens, positions)
    for count in range(1, most + 1):
        with few.installed(), few.step(model):
            found = _forward(model, cache, tokens[:count], positions[:count])
        if not all(torch.equal(ours, theirs[:count]) for ours, theirs in zip(found, expected, strict=True)):
            return False
    return True


def _forward(model: LanguageModel, cache: ContiguousCache, tokens: torch.Tensor,
             positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(hidden states, logits) of a token of each row. It writes the cache before it reads it, so that it can be repeated."""
    from dflash_mcmc.inference.model_runner import ModelRunner

    runner = ModelRunner(model, None, _ATTENTION, cache.length, cache.length, _WIDTH_STEP)
    with model.attending(_ATTENTION):
        hidden = runner.forward(cache, slice(0, len(tokens)), tokens, positions, cache.length)[:, 0]
        return hidden, model.logits(hidden)


def _draws_agree(vocab_size: int, most: int) -> bool:
    """Whether weights and log-probabilities of few rows have the bits of eight."""
    generator = torch.Generator().manual_seed(0)
    logits = 4.0 * torch.randn(ROWS, vocab_size, generator=generator)
    expected = laws.weigh(logits)
    tokens = laws.argmax(logits)
    log_p = expected.log_probability(tokens)
    for count in range(1, most + 1):
        found = laws.weigh(logits[:count].clone())
        same = [torch.equal(ours, theirs[:count]) for ours, theirs in zip(found, expected, strict=True)]
        if not (all(same) and torch.equal(found.log_probability(tokens[:count]), log_p[:count])):
            return False
    return True
