"""The fastest of several products of the same factors, found by the times of the calls that need one.

A product is timed in the calls themselves: nothing is computed for it but a comparison of the results, once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from math import ceil, inf
from typing import Any

import torch

from hf_specgen.clock import thread_clock

SMALL = 8  # numbers of tokens up to it have choices of their own
COMPUTE_BOUND_TOKENS = 64  # from which on the time of a product grows in proportion to them
SAMPLES = 3  # times of a product until one is chosen, by the shortest; further times may change the choice
SLOW = 1.5  # times the shortest time of all: a product that takes longer is timed once until one is chosen
CALLS_PER_TIME = 128  # of layers of one shape, of which one is timed after that: the first ones may have been delayed
COMPILING = 1 / 16  # of the time of layers, what may at most be spent on trying products that compile a kernel

Product = Callable[[Any, torch.Tensor], torch.Tensor]
"""A method of a layer, of which the argument is its input."""


class ProductChoice:
    """The fastest product of layers of one shape for some number of tokens.

    The layers of a model take turns, so that their weights are not in the processor's cache when they are timed.
    """

    compilation = 0.0
    """Of all choices: the shortest comparison with products that compile, in seconds of a thread; 0 before any."""

    def __init__(self, ordinary: Product, others: Sequence[Product], compiled: Sequence[Product], same: set[Product]):
        """`others` need no kernel, `compiled` ones do; all give the result of the `ordinary` one, but for rounding.

        `same` are products that a choice for another number of tokens has compared, and found to give that result; what
        this one finds is added. Others among them are not compared again.
        """
        self.fastest: Product | None = None
        self._ordinary = ordinary
        self._compiled = tuple(compiled)
        self._same = same
        self._usable = [ordinary, *(product for product in others if product in same)]
        # In the order of their comparisons; as threads share a choice, it is read once, and replaced as a whole.
        uncompared = tuple(product for product in others if product not in same)
        self._unchecked = tuple(group for group in (uncompared, self._compiled) if group)
        # How often each product was timed, and its shortest time, divided by the number of tokens.
        products = (ordinary, *others, *compiled)
        self._num_timed = dict.fromkeys(products, 0)
        self._seconds_per_token = dict.fromkeys(products, inf)
        self._calls = 0  # since the last one that was timed
        self._interval = CALLS_PER_TIME  # calls until another one is timed
        self._spent = 0.0  # seconds in all calls so far

    def product(self) -> Product | None:
        """The fastest product; None if the call is to be timed."""
        self._calls += 1
        return self.fastest if self._calls < self._interval else None

    @property
    def is_ordinary(self) -> bool:
        """Whether the layers are better left as they are: their own product is the fastest, no comparison is due."""
        return self.fastest is self._ordinary and not (self._unchecked and self._calls >= self._interval)

    def count_ordinary_calls(self, calls: int) -> None:
        """Count calls of layers that are left as they are, which `product` is not asked for."""
        self._calls += calls

    def timed(self, layer: Any, x: torch.Tensor, began: float) -> torch.Tensor:
        """The layer's output by the product that was timed the least often, whose time is recorded.

        The time of another product than the ordinary one begins at `began`, so that it includes the detour to it.
        """
        tokens = max(COMPUTE_BOUND_TOKENS, x.numel() // x.shape[-1])  # prompts are of many lengths
        unchecked = self._unchecked
        is_comparison = bool(unchecked) and self._calls_until_comparison(unchecked[0], tokens) == 0
        product = self._ordinary if is_comparison else min(self._contenders(), key=self._num_timed.__getitem__)
        if product is self._ordinary:
            began = time.perf_counter()
        output = product(layer, x)
        seconds = time.perf_counter() - began
        self._spent += self._calls * seconds
        self._calls = 0
        self._seconds_per_token[product] = min(self._seconds_per_token[product], seconds / tokens)
        self._num_timed[product] += 1
        if is_comparison:
            self._compare(unchecked[0], layer, x, output)
        elif all(self._num_timed[product] >= SAMPLES for product in self._contenders()):
            self.fastest = min(self._usable, key=self._seconds_per_token.__getitem__)
        self._interval = CALLS_PER_TIME
        if unchecked:
            self._interval = max(1, self._calls_until_comparison(unchecked[0], tokens))
        return output

    def _contenders(self) -> list[Product]:
        """The products that may be the fastest; all of them once one has been chosen, as times may have been wrong."""
        slow = inf if self.fastest else SLOW * min(self._seconds_per_token.values())
        return [
            product
            for product in self._usable
            if self._seconds_per_token[product] <= slow or not self._num_timed[product]
        ]

    def _calls_until_comparison(self, products: Sequence[Product], tokens: int) -> int:
        """After how many calls these products are to be compared with the ordinary one; 0: in this one."""
        if products != self._compiled:
            return 0
        seconds = tokens * min(self._seconds_per_token.values())
        if not 0 < seconds < inf:  # nothing has been timed yet
            return CALLS_PER_TIME
        # A matrix of a single layer, such as that of the output, may take longer to multiply than a kernel to compile.
        cost = ProductChoice.compilation + len(products) * seconds
        spent = self._spent + self._calls * seconds
        return min(CALLS_PER_TIME, max(0, ceil((cost / COMPILING - spent) / seconds)))

    def _compare(self, products: Sequence[Product], layer: Any, x: torch.Tensor, output: torch.Tensor) -> None:
        """Find those of the next products that this machine has, and that compute the same `output`.

        They are not timed now: the weights are in the processor's cache.
        """
        clock = thread_clock()
        began = clock()
        if not output.isfinite().all():  # there is nothing to compare with
            return
        same = [product for product in products if is_same_output(_output_or_none(product, layer, x), output)]
        self._usable = [*(product for product in self._usable if product not in same), *same]
        self._unchecked = tuple(group for group in self._unchecked if group is not products)
        self._same.update(same)
        self.fastest = None
        seconds = clock() - began
        _thread.seconds = comparison_seconds() + seconds
        if products == self._compiled:
            ProductChoice.compilation = min(seconds, ProductChoice.compilation or inf)


class ShapeChoices:
    """The choices of layers of one shape, for each number of tokens.

    Products that need no kernel are compared with the ordinary one once for a single token and once for several, since
    they are computed in two ways.
    """

    def __init__(self, ordinary: Product, others: Sequence[Product], compiled: Sequence[Product]):
        """The products are those of `ProductChoice`."""
        self._products = (ordinary, others, compiled)
        self._choices: dict[int, ProductChoice] = {}
        self._same: dict[bool, set[Product]] = {True: set(), False: set()}  # by whether there is a single token

    def choice(self, tokens: int) -> ProductChoice:
        """The choice for a number of tokens."""
        size = size_class(tokens)
        choice = self._choices.get(size)
        if choice is None:
            choice = self._choices.setdefault(size, ProductChoice(*self._products, self._same[tokens == 1]))
        return choice

    def count_ordinary_calls(self, size: int | None, calls: int) -> None:
        """Count calls of layers that are left as they are, if the class of their number of tokens is known."""
        choice = None if size is None else self._choices.get(size)
        if choice is not None:
            choice.count_ordinary_calls(calls)

    def is_ordinary(self, size: int | None) -> bool:
        """Whether layers are better left as they are for numbers of tokens of a class; None: of all small ones."""
        sizes = range(1, 1 + SMALL) if size is None else (size,)
        choices = [self._choices[size] for size in sizes if size in self._choices]
        return bool(choices) and all(choice.is_ordinary for choice in choices)


def size_class(tokens: int) -> int:
    """Numbers of tokens that share a choice: each small one has its own, larger ones those up to a power of two."""
    return tokens if tokens <= SMALL else 1 << (tokens - 1).bit_length()


def comparison_seconds() -> float:
    """The time in which this thread has compared products; a pass with comparisons takes longer than others by it."""
    return getattr(_thread, "seconds", 0.0)


_thread = threading.local()


def _output_or_none(product: Product, layer: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The output of a layer by a product; None if the machine does not have it."""
    try:
        return product(layer, x)
    except RuntimeError:  # NotImplementedError is one
        return None


def is_same_output(output: torch.Tensor | None, expected: torch.Tensor) -> bool:
    """Whether two outputs differ by rounding alone, which is coarse in bfloat16."""
    if output is None or output.shape != expected.shape:
        return False
    tolerance = 0.02 if expected.dtype == torch.bfloat16 else 1e-4
    return bool((output.float() - expected.float()).norm() <= tolerance * expected.float().norm())
