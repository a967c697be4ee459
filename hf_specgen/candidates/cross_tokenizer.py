"""Draft models with another tokenizer, by token-level intersection (TLI): trees of tokens that both vocabularies have.

The draft model is restricted to these tokens: its logits for them become logits over the target's vocabulary, those of
all other tokens are left out. So its draft tokens are ordinary target tokens with probabilities q, which form trees and
are verified in every mode.

The draft model runs on the text in its own tokens. A token that both vocabularies have is taken over as it is; other
text is retokenized. Text near the end of a row may be tokenized differently once more of it is known, so the last few
tokens are encoded anew.

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (2025), section 4 (Token-Level Intersection).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, Literal

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.call import Compile
from hf_specgen.candidates.autoregressive import AutoregressiveSession, last_of
from hf_specgen.candidates.base import DraftCall, Tree, vocabulary_size
from hf_specgen.candidates.encoder_draft import draft_prompt, embedding_size, known_tokens
from hf_specgen.grown_tree import GrownTree
from hf_specgen.targets.cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.targets.support import position_table
from hf_specgen.tree import DraftTree

INCOMPLETE = "\ufffd"
"""The replacement character: what a tokenizer decodes the first bytes of a character to."""


class CrossTokenizerSession(AutoregressiveSession):
    """Drafts trees of tokens that both vocabularies have."""

    def __init__(
        self,
        call: DraftCall,
        draft: PreTrainedModel,
        k: int,
        tree: Tree,
        confidence_threshold: float,
        compile: Compile = False,
    ):
        assert call.model is not None
        names = str(call.model.name_or_path), str(draft.name_or_path)
        of_target, of_draft = map(load_tokenizer, names)
        codecs = Codec(of_target, of_draft), Codec(of_draft, of_target)
        self._embedded, self._max_positions = embedding_size(draft), position_table(text_config(draft))
        draft_size = min(draft.config.get_text_config().vocab_size, self._embedded)
        self._shared = shared_vocabulary(*names, vocabulary_size(call.model), draft_size)
        self._texts = [Retokenizer(*codecs, prompt, self._shared) for prompt in call.state.prompts]
        self._longest = max(len(text.tokens) for text in self._texts)
        if self._longest > self._max_positions:
            raise ValueError(
                f"the prompt has {self._longest} tokens of the draft's vocabulary, but the draft reads at most "
                f"{self._max_positions}; use another draft"
            )
        # The draft's tokens in its cache, of which the prompt's never change.
        self._cached = [known_tokens(text.tokens[: text.stable], self._embedded) for text in self._texts]
        self._prompt_lengths = list(map(len, self._cached))
        prompt = draft_prompt(draft, call, self._cached, share_encoder=None)
        self._reader = make_target(TargetRequirements(), draft, *prompt, compile=compile)
        self._prompt_logits: torch.Tensor | None = None
        self._seen = [0] * call.state.batch  # generated tokens of each row that its text contains
        self._is_complete = [True] * call.state.batch
        self._drafts = [True] * call.state.batch  # the rows that draft in this step
        self._tree_tokens = torch.zeros(0)  # the draft's tokens of the nodes of this step's tree
        size = None if self._reader.verifies_chains_only else tree
        super().__init__(call, k, size, confidence_threshold, vocabulary_size(call.model))

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        self._retokenize(max_depths)
        return super().draft(max_depths)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        self._retokenize(max_depths)
        return super().draft_at_prefill(max_depths)

    def max_draft_tokens(self, row: int) -> int:
        """How many tokens the draft can read after a row's text; 0 while the text ends within a character."""
        if not self._is_complete[row] or self._longest + MAX_DRAFT_SLOTS > self._reader.slot_limit:
            return 0
        return max(0, self._max_positions - len(self._texts[row].tokens))

    def first_scores(self) -> torch.Tensor:
        """Run the draft model on what its cache lacks of the texts of the rows that draft."""
        batch = len(self._texts)
        self._drafts = [depth > 0 and self.max_draft_tokens(row) > 0 for row, depth in enumerate(self.max_depths)]
        if self._prompt_logits is None:
            self._prompt_logits = self._reader.prefill(DraftTree.empty(batch))[:, -1]
        self._reader.drop_rows([not self.call.state.has_ended(row) for row in range(batch)])
        uncached = [self._uncached(row) if drafts else [] for row, drafts in enumerate(self._drafts)]
        lengths = zip(self._cached, self._prompt_lengths, strict=True)
        self._reader.rewind([len(tokens) - prompt for tokens, prompt in lengths])
        if not any(uncached):
            return self._shared.target_logits(self._prompt_logits)
        runs = [bool(tokens) for tokens in uncached]
        tree = DraftTree.chains([tokens[1:] for tokens in uncached])
        self.passes.append(sum(runs) * (1 + tree.nodes))
        logits = self._reader.forward(tree, [tokens[0] if tokens else 0 for tokens in uncached], runs)
        self._reader.commit([list(range(len(tokens) - 1)) if tokens else None for tokens in uncached])
        for cached, tokens in zip(self._cached, uncached, strict=True):
            cached += tokens
        after = last_of(logits, [len(tokens) for tokens in uncached])
        is_new = torch.tensor(runs, device=logits.device)[:, None]
        return self._shared.target_logits(torch.where(is_new, after, self._prompt_logits))

    def next_scores(self, tree: GrownTree, new: int) -> torch.Tensor:
        self._tree_tokens = self._shared.draft_tokens(tree.tokens)
        draft_tree = tree.with_tokens(self._tree_tokens)
        return self._shared.target_logits(self._reader.grow(draft_tree, new, self._drafts))

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep a path of the last tree in each row's cache."""
        self._reader.commit(paths)
        tokens = self._tree_tokens.tolist()
        for row, path in enumerate(paths):
            self._cached[row] += [tokens[row][node] for node in path]

    def _retokenize(self, max_depths: Sequence[int]) -> None:
        """Add what was generated since the last draft to the texts, unless no row drafts."""
        for row, generated in enumerate(self.call.state.generated if any(max_depths) else ()):
            self._is_complete[row] = self._texts[row].extend(generated[self._seen[row] :])
            self._seen[row] = len(generated)
        self._longest = max(len(text.tokens) for text in self._texts)

    def _uncached(self, row: int) -> list[int]:
        """The tokens of a row's text that the cache lacks; cached tokens that differ are dropped.

        The last token is always computed anew, for the logits after it, unless they are those after the prompt.
        """
        text, cached = self._texts[row], self._cached[row]
        same = min(text.unchanged, len(cached))
        tail = zip(cached[same:], known_tokens(text.tokens[same:], self._embedded), strict=False)
        same += sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], tail))
        same = max(self._prompt_lengths[row], min(same, len(text.tokens) - 1))
        del cached[same:]
        text.unchanged = len(text.tokens)
        return known_tokens(text.tokens[same:], self._embedded)


class Codec:
    """A tokenizer without the special tokens that another one does not know."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase):
        self._tokenizer = tokenizer
        unknown = (None, other.unk_token_id)
        special = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
        self._hidden = {index for index, token in special if other.convert_tokens_to_ids(token) in unknown}
        self._line_break = self._encode("\n")

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; special tokens that the other tokenizer does not know are left out."""
        shown = [token for token in tokens if token not in self._hidden]
        return str(self._tokenizer.decode(shown, clean_up_tokenization_spaces=False))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that follows another: SentencePiece adds a space to what begins a text."""
        tokens, before = self._encode("\n" + text), len(self._line_break)
        return tokens[before:] if tokens[:before] == self._line_break else self._encode(text)

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens of a text with which a sequence begins, with special tokens such as BOS."""
        tokens: list[int] = list(self._tokenizer.encode(text))
        begin = self._tokenizer.bos_token_id
        return tokens[1:] if tokens[:2] == [begin, begin] else tokens  # the text has begun with one, too

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))


class Retokenizer:
    """One row's text in the draft's tokens.

    Args:
        target, draft: of the two tokenizers.
        prompt: the row's prompt in the target's tokens.
        shared: the tokens that both vocabularies have.

    Attributes:
        tokens: the text in the draft's tokens.
        stable: how many of them at the beginning never change: all of the prompt.
        unchanged: how many of them at the beginning have not changed since it was last set.
    """

    def __init__(self, target: Codec, draft: Codec, prompt: Sequence[int], shared: SharedVocabulary):
        self._target, self._draft, self._shared = target, draft, shared
        complete = len(prompt)
        while complete and target.decode(prompt[:complete]).endswith(INCOMPLETE):
            complete -= 1
        self._text: list[int] = list(prompt[:complete])
        self._incomplete: list[int] = []
        self.tokens: list[int] = draft.encode_prompt(target.decode(self._text)) or [0]
        self.stable = self.unchanged = len(self.tokens)
        self.extend(prompt[complete:])

    def extend(self, new: Sequence[int]) -> bool:
        """Append target tokens; returns False, and keeps them for the next call, while a character is incomplete."""
        if not new:
            return not self._incomplete
        new = [*self._incomplete, *new]
        shared = [index for token in new if (index := self._shared.draft_token(token)) is not None]
        if len(shared) == len(new):
            self.tokens += shared
        elif not self._retokenize(new):
            return False
        self._text.extend(new)
        return True

    def _retokenize(self, new: list[int]) -> bool:
        """Encode the end of the text again, with new target tokens; returns False while a character is incomplete."""
        window = self._text[-8:]  # earlier tokens do not change in practice
        before, after = self._target.decode(window), self._target.decode([*window, *new])
        self._incomplete = new if after.endswith(INCOMPLETE) else []
        if self._incomplete:
            return False
        kept = self._first_unstable()
        tail = self._draft.decode(self.tokens[kept:])
        text = tail + after[len(before) :] if after.startswith(before) else tail + self._target.decode(new)
        self.tokens[kept:] = self._draft.encode(text)
        self.unchanged = min(self.unchanged, kept)
        return True

    def _first_unstable(self) -> int:
        """Index of the first token that is encoded anew; a character begins there."""
        index = max(self.stable, len(self.tokens) - 8)
        while index > self.stable and self._draft.decode(self.tokens[index:]).startswith(INCOMPLETE):
            index -= 1
        return index


class SharedVocabulary:
    """The common tokens of two vocabularies.

    Args:
        draft_ids: for each token of the target, the id of the draft's token with the same text, or -1.
        target_size: number of logits of the target.
        draft_size: number of tokens that the draft has embeddings and logits for; its other tokens are not shared.

    Example:
        >>> shared = SharedVocabulary([2, -1, 0], target_size=4, draft_size=3)
        >>> shared.draft_token(0), shared.draft_token(1)
        (2, None)
        >>> # token 3 of the target is a padding row of its embedding matrix
        >>> shared.target_logits(torch.tensor([5.0, 6.0, 7.0])).tolist()
        [7.0, -1000000000.0, 5.0, -1000000000.0]
    """

    def __init__(self, draft_ids: Sequence[int], target_size: int, draft_size: int):
        known = [index if index < draft_size else -1 for index in draft_ids[:target_size]]
        self._draft_ids = known + [-1] * (target_size - len(known))
        self._index = torch.tensor(self._draft_ids)

    def draft_token(self, token: int) -> int | None:
        """The draft's token for a token of the target; None where it has none."""
        index = self._draft_ids[token] if token < len(self._draft_ids) else -1
        return None if index < 0 else index

    def draft_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """The draft's tokens for those of the target, of any shape; 0 where it has none."""
        return self._on(tokens.device)[tokens].clamp(min=0)

    def _on(self, device: torch.device) -> torch.Tensor:
        """The draft's ids on a device."""
        if self._index.device != device:
            self._index = self._index.to(device)
        return self._index

    def target_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The draft's logits over the target's vocabulary: `[…, draft vocab]` to `[…, target vocab]`, float32."""
        index = self._on(logits.device)
        # Finite, so that scores stay valid if a processor suppresses all others; its exponential is 0.
        return logits[..., index.clamp(min=0)].float().masked_fill_(index < 0, -1e9)


@lru_cache(maxsize=8)
def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or repository."""
    return AutoTokenizer.from_pretrained(name)


@lru_cache(maxsize=8)
def shared_vocabulary(target: str, draft: str, target_size: int, draft_size: int) -> SharedVocabulary:
    """The common tokens of the tokenizers in two folders or repositories; kept for later calls."""
    return SharedVocabulary(shared_ids(target, draft), target_size, draft_size)


def shared_ids(target: str, draft: str) -> tuple[int, ...]:
    """For each token of the target's tokenizer, the id of the draft's token with the same text, or -1."""
    target_ids, draft_ids = (token_texts(load_tokenizer(name)) for name in (target, draft))
    ids = [-1] * (1 + max(target_ids.values(), default=-1))
    for text, index in target_ids.items():
        ids[index] = draft_ids.get(text, -1)
    return tuple(ids)


def token_texts(tokenizer: PreTrainedTokenizerBase) -> dict[tuple[Literal["text", "name"], str], int]:
    """The text of every token inside a sentence, with its id; its name where it has no text of its own.

    Decoded behind another token: then "▁the" of SentencePiece and "Ġthe" of byte-level BPE both are " the", and "ing"
    is the text of WordPiece's "##ing". A token that is a part of a character has the name of its vocabulary, which is
    the same in all byte-level vocabularies. Names are kept apart from texts: byte C3 has the name "Ã", which is also
    the text of the token "Ãĥ". Of several tokens with one text the last counts: SentencePiece has its bytes first.
    """
    first = tokenizer.encode("x", add_special_tokens=False)[-1:]
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    before, *texts = _decoded(tokenizer, [first, *([*first, index] for _, index in vocabulary)])
    found: dict[tuple[Literal["text", "name"], str], int] = {}
    for (name, index), text in zip(vocabulary, texts, strict=True):
        added = text[len(before) :] if text.startswith(before) else ""
        found[("name", name) if not added or INCOMPLETE in added else ("text", added)] = index
    return found


def _decoded(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    """The text of each sequence of tokens; at once where the tokenizer can."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and hasattr(backend, "decode_batch"):
        return list(backend.decode_batch(sequences, skip_special_tokens=False))
    return [str(tokenizer.decode(tokens, clean_up_tokenization_spaces=False)) for tokens in sequences]
