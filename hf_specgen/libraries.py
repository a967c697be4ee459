"""Objects of other libraries that are recognised, by what they have: nowhere else in the package.

| library | objects |
|---|---|
| xgrammar, llguidance, outlines, lm-format-enforcer | the grammars of logits processors |
| tokenizers | the backend of a fast tokenizer |
| PEFT, DDP, DeepSpeed, `torch.compile` | wrappers of models, PEFT's hooks |

None of them is imported: a process that has such an object has imported its library.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PrefixConstrainedLogitsProcessor, PreTrainedModel

from hf_specgen import compat


class GrammarState(ABC):
    """A grammar after some tokens; immutable."""

    @property
    @abstractmethod
    def allowed(self) -> NDArray[np.bool_]:
        """`[vocab]` which tokens may follow."""

    @abstractmethod
    def after(self, token: int) -> GrammarState:
        """The state after an allowed token."""


class _MatcherState(GrammarState):
    """A matcher of xgrammar or llguidance, which can be forked."""

    def __init__(self, matcher: Any, vocab: int):
        super().__init__()
        self._matcher = matcher
        self._vocab = vocab

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        words = (self._vocab + 31) // 32
        if hasattr(self._matcher, "compute_bitmask"):
            stopped = self._matcher.is_stopped()
            bitmask = np.frombuffer(bytes(4 * words) if stopped else self._matcher.compute_bitmask(), np.uint8)
        else:
            bits = np.full((1, words), 0 if self._matcher.is_terminated() else -1, np.int32)
            if bits[0, 0]:
                self._matcher.fill_next_token_bitmask(bits, 0)
            bitmask = bits.view(np.uint8)[0]
        return np.unpackbits(bitmask, bitorder="little")[: self._vocab].astype(bool)

    def after(self, token: int) -> GrammarState:
        if hasattr(self._matcher, "deep_copy"):
            matcher = self._matcher.deep_copy()
            matcher.consume_token(token)
        else:
            matcher = self._matcher.fork()
            matcher.accept_token(token)
        return _MatcherState(matcher, self._vocab)


class _AutomatonState(GrammarState):
    """A state of the automaton of outlines."""

    def __init__(self, index: Any, state: int | None, vocab: int):
        super().__init__()
        self._index = index
        self._state = state
        self._vocab = vocab

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        tokens = None if self._state is None else self._index.get_allowed_tokens(self._state)
        return _mask(tokens or [], self._vocab)

    def after(self, token: int) -> GrammarState:
        return _AutomatonState(self._index, self._index.get_next_state(self._state, token), self._vocab)


class _ReplayedState(GrammarState):
    """The text so far, prompt included, for lm-format-enforcer, which keeps what it computed for earlier texts."""

    def __init__(self, enforcer: Any, text: list[int], vocab: int):
        super().__init__()
        self._enforcer = enforcer
        self._text = text
        self._vocab = vocab

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        return _mask(self._enforcer.get_allowed_tokens(self._text).allowed_tokens, self._vocab)

    def after(self, token: int) -> GrammarState:
        return _ReplayedState(self._enforcer, [*self._text, token], self._vocab)


def _mask(tokens: Sequence[int], vocab: int) -> NDArray[np.bool_]:
    mask = np.zeros(vocab, dtype=bool)
    mask[[token for token in tokens if token < vocab]] = True
    return mask


def grammar_states(processor: Any, texts: Sequence[list[int]], vocab: int) -> list[GrammarState]:
    """The states of a processor's grammar: made anew from it, or forked from matchers that it was given.

    One for each row, or one for all; none if the processor has no grammar that is known. `texts` are the prompts of the
    rows, as the processor receives them.
    """
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        enforcer = getattr(compat.prefix_function(processor), "token_enforcer", None)
        return [] if enforcer is None else [_ReplayedState(enforcer, text, vocab) for text in texts]
    settings = getattr(processor, "__dict__", {})
    if "llg_tokenizer" in settings and "grammar" in settings:
        matcher = sys.modules["llguidance"].LLMatcher(settings["llg_tokenizer"], settings["grammar"])
        return [_MatcherState(matcher, vocab)]
    for value in settings.values():
        items = value if isinstance(value, (list, tuple)) else [value]
        kinds = {type(item).__name__ for item in items}
        if kinds == {"Index"} and hasattr(items[0], "get_next_state"):
            return [_AutomatonState(index, index.get_initial_state(), vocab) for index in items]
        if kinds == {"CompiledGrammar"}:
            return [_MatcherState(sys.modules["xgrammar"].GrammarMatcher(item), vocab) for item in items]
        if kinds == {"GrammarMatcher"}:
            return [_MatcherState(matcher.fork(), vocab) for matcher in items]
        if kinds == {"LLMatcher"}:
            return [_MatcherState(matcher.deep_copy(), vocab) for matcher in items]
    return []


def decoded(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    """The text of each sequence of tokens; at once where the tokenizer has a backend of tokenizers."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "decode_batch"):
        return list(backend.decode_batch(sequences, skip_special_tokens=False))
    return [str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False)) for tokens in sequences]


def unwrapped_model(model: Any) -> PreTrainedModel | None:
    """The Transformers model inside PEFT, DDP, DeepSpeed or `torch.compile`; None if there is none."""
    inner: Any = model
    while isinstance(inner, nn.Module) and not isinstance(inner, PreTrainedModel):
        if hasattr(inner, "get_base_model"):  # PEFT
            inner = cast(Any, inner).get_base_model()
            continue
        whole = compat.unwrapped(inner)  # torch.compile
        inner = getattr(inner, "module", None) if whole is inner else whole  # DDP, DeepSpeed
    return inner if isinstance(inner, PreTrainedModel) else None


def prompt_learning(model: Any) -> str | None:
    """The kind of prompt learning of a PEFT wrapper, which adds virtual tokens; None for other adapters and models."""
    config: Any = getattr(model, "active_peft_config", None)
    return str(config.peft_type.value) if getattr(config, "is_prompt_learning", False) else None


def has_virtual_tokens(model: PreTrainedModel) -> bool:
    """Whether PEFT adds prefix or prompt tuning: its `generate` replaces `prepare_inputs_for_generation` by its own."""
    owner = getattr(cast(Any, model).prepare_inputs_for_generation, "__self__", None)
    return prompt_learning(owner) is not None


def uses_activated_lora(model: PreTrainedModel) -> bool:
    """Whether a call has an activated LoRA (aLoRA) of PEFT, whose offsets count from the end of each pass."""
    is_used = "peft" in sys.modules
    return is_used and any("alora_offsets" in keywords for _, _, keywords in _adapter_hooks(model))


def adapter_names(model: PreTrainedModel) -> Sequence[str] | None:
    """The adapters that a call of PEFT's `generate(adapter_names=…)` gives its rows; None for a call without them."""
    if "peft" not in sys.modules:
        return None
    return next(
        (keywords["adapter_names"] for _, _, keywords in _adapter_hooks(model) if "adapter_names" in keywords), None
    )


@contextmanager
def adapter_hooks_removed(model: Any) -> Iterator[None]:
    """Removes after an exception or Ctrl-C the hooks of `generate(adapter_names=…)`, which PEFT leaves on modules."""
    try:
        yield
    except BaseException:
        for module, number, _ in list(_adapter_hooks(model)):
            compat.remove_forward_pre_hook(module, number)
        raise


def _adapter_hooks(model: Any) -> Iterator[tuple[Any, int, dict[str, Any]]]:
    """Module, number and keywords of PEFT's hooks that give its layers the adapters of a call: partial functions."""
    for module in model.modules():
        for number, hook in compat.forward_pre_hooks(module).items():
            if isinstance(hook, partial) and hook.keywords.keys() & {"adapter_names", "alora_offsets"}:
                yield module, number, hook.keywords
