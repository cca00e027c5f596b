"""Steps of fewer than eight slots with the bits of eight, in float32 on a CPU.

A step of S slots that feed B tokens each has S B rows in its linear layers, where a padded step has 8 B. Up to seven rows are
multiplied by `piecewise_product.py`, more are padded to the next multiple of eight.

`of` tests on the machine that it runs on whether the bits are the same: every linear layer and norm, then whole steps with the
draft (`few_rows_bits.py`). A norm that differs keeps its own form. If anything else fails, there is no `FewRows`, and steps
have eight slots. Whether the memory holds the transposed weights is decided before, by `plan.plan`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.functional import linear, pad

from dflash_mcmc.engine.batching import fused_norms, joint_product, piecewise_product
from dflash_mcmc.engine.batching.fused_norms import Norm
from dflash_mcmc.engine.batching.joint_product import JointProduct, linears, products
from dflash_mcmc.engine.batching.piecewise_product import ROWS
from dflash_mcmc.engine.speculative.drafter import DFlashDrafter, Drafter

if TYPE_CHECKING:
    from dflash_mcmc.engine.batching.interface import Options
    from dflash_mcmc.engine.batching.language_model import LanguageModel
    from dflash_mcmc.engine.batching.plan import DraftSize
    from dflash_mcmc.engine.speculative.speculation import Rule

_WIDTH_STEP = 64
"""Widths of layers are multiples of it. A vectorised function computes the rest of its elements by other instructions."""
ATTENTION = "grouped"
_KEPT_BYTES = 64_000_000
"""Products of several kinds of steps of a model are kept up to this size together. One kind is always kept."""
_KNOWN: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple, FewRows | None]] = weakref.WeakKeyDictionary()


class EngineSteps(NamedTuple):
    """What the steps of an engine compute.

    Attributes:
        most: slots, 1 to 7.
        drafter: proposes blocks or gives the draft's states; None without a draft.
        rule: decides about blocks; None if tokens are not drawn block by block.
    """

    most: int
    drafter: Drafter | None = None
    rule: Rule | None = None

    @property
    def reach(self) -> int:
        """The largest number of tokens of a slot in a forward."""
        return 1 if self.drafter is None else self.drafter.num_drafted + 1

    @property
    def network(self) -> torch.nn.Module | None:
        """The draft's network; None without one."""
        return self.drafter.network if isinstance(self.drafter, DFlashDrafter) else None

    @property
    def rows(self) -> int:
        """The largest number of rows of a product that is not padded."""
        return min(self.most * self.reach, ROWS - 1)

    def key(self) -> tuple:
        """Equal for steps with the same bits, in this process."""
        network = self.network
        return (self.most, self.reach, type(self.drafter), None if network is None else weakref.ref(network), self.rule,
                torch.get_num_threads())


class FewRows:
    """The linear layers, the norms and the head of a model and its draft as products and operations of few rows.

    Args:
        products: a product for each linear layer of decoder and draft, and the layer's number in it.
        norms: the fused form of norms of the decoder.
        head: the product of the head.
        most: largest number of slots for which the bits have been compared.
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
        """A context in which `step` can switch the layers and norms. Contexts of one model may be nested."""
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
        """A context for the forwards of a step of at most `most` slots, and for their logits."""
        self._on = True
        try:
            with model.multiplied_by(self._logits):
                yield
        finally:
            self._on = False

    def is_current(self) -> bool:
        """Whether target and draft still have the weights of the products."""
        return all(joint.is_current() for joint in (*self._joint, self._head))

    def _logits(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if _are_few(rows):
            return self._head.multiply(rows, bias)
        return _padded(rows, self._head.layers[0].weight, bias)

    def _linear(self, layer: torch.nn.Linear, joint: JointProduct, number: int) -> Norm:
        few = partial(joint.of_layer, number)
        return self._switched(lambda rows: few(rows) if _are_few(rows) else _padded(rows, layer.weight, layer.bias),
                              lambda rows: linear(rows, layer.weight, layer.bias))

    def _switched(self, few: Norm, own: Norm) -> Norm:
        """`few` during a step of few rows, otherwise the module's own function."""
        return lambda rows: few(rows) if self._on else own(rows)


def asked_for(options: Options, num_slots: int, implementation: str, draft: Drafter | DraftSize | None) -> bool:
    """Whether an engine makes steps of few rows, where model, draft and machine allow it."""
    return (options.few_rows and num_slots < ROWS and implementation == ATTENTION
            and (draft is None or draft.num_weights is not None))


@torch.inference_mode()
def of(model: LanguageModel, steps: EngineSteps) -> FewRows | None:
    """The products for steps of at most `steps.most` slots; None where the bits are not those of eight slots.

    Products of a model are kept as long as the model, and made again when weights have changed. They are compared with the
    model's own forwards while no other thread uses the model.
    """
    known = _KNOWN.setdefault(model.decoder, {})
    key = steps.key()
    if key in known:
        found = known[key]
        if found is None or found.is_current():
            return found
    with model.turn.taken(nests=True):
        if (len(known) + 1) * num_bytes(model, steps.drafter) > _KEPT_BYTES:
            known.clear()
        known[key] = _found(model, steps)
        return known[key]


def fits(model: LanguageModel, drafter: Drafter | None = None) -> bool:
    """Whether few rows are made for model and draft: float32 on a CPU, with linear layers of usual widths."""
    network = EngineSteps(1, drafter).network
    weights = [layer.weight for module in (model.decoder, network) if module is not None for layer in linears(module)]
    return (model.device.type == "cpu" and model.dtype == torch.float32 and not model.has_experts
            and not model.recurrent_nets and bool(linears(model.decoder)) and type(model.head) is torch.nn.Linear
            and all(weight.dtype == torch.float32 and not any(size % _WIDTH_STEP for size in weight.shape)
                    for weight in weights))


def num_bytes(model: LanguageModel, drafter: Drafter | None = None) -> int:
    """Bytes of the transposed weights, which `of` makes."""
    drafted = drafter.num_weights or 0 if drafter else 0
    return 4 * (model.vocab_size * model.config.hidden_size + drafted
                + sum(layer.weight.numel() for layer in linears(model.decoder)))


def _found(model: LanguageModel, steps: EngineSteps) -> FewRows | None:
    from dflash_mcmc.engine.batching import few_rows_bits as bits

    if not (fits(model, steps.drafter) and bits.draws_agree(model.vocab_size, steps)):
        return None
    layers = products(model.decoder, steps.rows, joint_product.TARGET)
    drafted = {} if steps.network is None else products(steps.network, steps.rows, joint_product.DRAFT)
    head = piecewise_product.find(model.head.weight, None, steps.rows)
    if layers is None or drafted is None or head is None:
        return None
    few = FewRows({**layers, **drafted}, fused_norms.fused(model.decoder, steps.rows),
                  JointProduct([model.head], head.piece, steps.rows), steps.most)
    return few if bits.steps_agree(few, model, steps) else None


def _are_few(rows: torch.Tensor) -> bool:
    return rows.numel() < ROWS * rows.shape[-1]


def _padded(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A linear layer of rows (..., inputs) that are padded to a multiple of eight: (..., outputs)."""
    flat = rows.reshape(-1, rows.shape[-1])
    found = linear(pad(flat, (0, 0, 0, -len(flat) % ROWS)), weight, bias)
    return found[: len(flat)].view(*rows.shape[:-1], -1)
