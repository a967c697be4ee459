"""Draft models with another tokenizer, by token-level intersection (TLI): trees of tokens that both vocabularies have.

The draft model runs on the text in its own tokens. A token that both vocabularies have is taken over as it is; other
text is retokenized. Text near the end of a row may be tokenized differently once more of it is known, so the last few
tokens are encoded anew.

Source: Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (2025), section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.call import Compile
from hf_specgen.candidates.autoregressive import AutoregressiveSession
from hf_specgen.candidates.base import DraftCall, DraftSession, Tree, vocabulary_size
from hf_specgen.candidates.encoder_draft import draft_prompt, embedding_size, known_tokens
from hf_specgen.candidates.shared_vocabulary import INCOMPLETE, SharedVocabulary, load_tokenizer, shared_vocabulary
from hf_specgen.targets.model_parts import text_config
from hf_specgen.targets.own_cache import MAX_DRAFT_SLOTS
from hf_specgen.targets.requirements import TargetRequirements, make_target
from hf_specgen.targets.support import position_table
from hf_specgen.tree import DraftTree


def cross_tokenizer_session(
    call: DraftCall,
    draft: PreTrainedModel,
    k: int,
    tree: Tree,
    confidence_threshold: float,
    compile: Compile = False,
) -> DraftSession:
    """The session of a draft model whose tokenizer differs from the target's.

    Args:
        call: the call; `call.model` is set.
        draft: the draft model.
        k, tree, confidence_threshold, compile: as in `DraftModelCandidates`.
    """
    assert call.model is not None
    names = str(call.model.name_or_path), str(draft.name_or_path)
    of_target, of_draft = map(load_tokenizer, names)
    codecs = Codec(of_target, of_draft), Codec(of_draft, of_target)
    draft_size = min(draft.config.get_text_config().vocab_size, embedding_size(draft))
    shared = shared_vocabulary(*names, vocabulary_size(call.model), draft_size)
    rows = [Retokenizer(*codecs, prompt, shared) for prompt in call.state.prompts]
    text = DraftText(call, draft, rows, compile)
    return CrossTokenizerSession(call, text, shared, k, tree, confidence_threshold)


class CrossTokenizerSession(AutoregressiveSession):
    """Drafts trees of tokens that both vocabularies have.

    Args:
        call: the call.
        text: the rows' texts in the draft's tokens.
        shared: the common tokens.
        k, tree, confidence_threshold: as in `DraftModelCandidates`.
    """

    def __init__(
        self,
        call: DraftCall,
        text: DraftText,
        shared: SharedVocabulary,
        k: int,
        tree: Tree,
        confidence_threshold: float,
    ):
        assert call.model is not None
        size = None if text.chains_only else tree
        super().__init__(call, k, size, confidence_threshold, vocabulary_size(call.model))
        self._text, self._shared = text, shared
        self._drafts = [True] * call.state.batch  # the rows that draft in this step
        self._tree_tokens: list[list[int]] = []  # the draft's tokens of the nodes of this step's tree

    def draft(self, max_depths: Sequence[int]) -> DraftTree:
        if any(max_depths):
            self._text.follow()
        return super().draft(max_depths)

    def draft_at_prefill(self, max_depths: Sequence[int]) -> DraftTree:
        if any(max_depths):
            self._text.follow()
        return super().draft_at_prefill(max_depths)

    def max_draft_tokens(self, row: int) -> int:
        return self._text.max_draft_tokens(row)

    def first_scores(self) -> torch.Tensor:
        self._drafts = [depth > 0 and self.max_draft_tokens(row) > 0 for row, depth in enumerate(self.max_depths)]
        return self._shared.target_logits(self._text.read(self._drafts, self.passes))

    def next_scores(self, tree: DraftTree, new: int) -> torch.Tensor:
        draft_tree = DraftTree(self._shared.draft_tokens(tree.tokens), tree.parents)
        self._tree_tokens = draft_tree.tokens.tolist()
        return self._shared.target_logits(self._text.grow(draft_tree, new, self._drafts))

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        self._text.commit(paths, self._tree_tokens)


class DraftText:
    """The rows' texts in the draft's tokens, and how much of them the draft model has in its cache.

    Args:
        call: the call.
        draft: the draft model.
        rows: translate the text of each row.
        compile: whether the draft's passes are compiled.

    Raises:
        ValueError: if a prompt is longer than what the draft can read.
    """

    def __init__(self, call: DraftCall, draft: PreTrainedModel, rows: Sequence[Retokenizer], compile: Compile):
        self._state, self._rows = call.state, rows
        self._embedded = embedding_size(draft)
        self._max_positions = position_table(text_config(draft))
        self._longest = max(len(row.tokens) for row in rows)
        if self._longest > self._max_positions:
            raise ValueError(
                f"the prompt has {self._longest} tokens of the draft's vocabulary, but the draft reads at most "
                f"{self._max_positions}; use another draft"
            )
        self._cached = [self._known(row.tokens[: row.stable]) for row in rows]
        self._prompt_lengths = list(map(len, self._cached))
        prompt = draft_prompt(draft, call, self._cached, share_encoder=None)
        self._reader = make_target(TargetRequirements(), draft, *prompt, compile=compile)
        self.chains_only = self._reader.verifies_chains_only
        """Whether the draft model can only read chains."""
        self._seen = [0] * len(rows)
        self._is_complete = [True] * len(rows)
        self._prompt_logits: torch.Tensor | None = None

    def follow(self) -> None:
        """Translate what has been generated since the last call."""
        for row, text in enumerate(self._state.generated):
            self._is_complete[row] = self._rows[row].extend(text[self._seen[row] :])
            self._seen[row] = len(text)
        self._longest = max(len(row.tokens) for row in self._rows)

    def max_draft_tokens(self, row: int) -> int:
        """How many tokens the draft can read after a row's text; 0 while the text ends within a character."""
        if not self._is_complete[row] or self._longest + MAX_DRAFT_SLOTS > self._reader.slot_limit:
            return 0
        return max(0, self._max_positions - len(self._rows[row].tokens))

    def read(self, active: Sequence[bool], passes: list[int]) -> torch.Tensor:
        """Read what the cache lacks of the texts of the active rows.

        Args:
            active: the rows to read, as `follow` has translated them.
            passes: receives the number of tokens of the pass over new text, if there is one.

        Returns:
            `[batch, draft vocab]` logits after each active row's text.
        """
        if self._prompt_logits is None:
            self._prompt_logits = self._reader.prefill(DraftTree.empty(len(active)))[:, -1]
        self._reader.drop_rows([not self._state.has_ended(row) for row in range(len(active))])
        uncached = [self._uncached(row) if is_active else [] for row, is_active in enumerate(active)]
        self._rewind()
        return self._forward(uncached, passes) if any(uncached) else self._prompt_logits

    def grow(self, tree: DraftTree, new: int, active: Sequence[bool]) -> torch.Tensor:
        """Read the last `new` nodes of a tree of draft tokens; `[batch, new, draft vocab]` logits after each."""
        return self._reader.grow(tree, new, active)

    def commit(self, paths: Sequence[Sequence[int]], tokens: Sequence[Sequence[int]]) -> None:
        """Keep a path of the last tree in each row's cache; `tokens` are those of its nodes."""
        self._reader.commit(paths)
        for row, path in enumerate(paths):
            self._cached[row] += [tokens[row][node] for node in path]

    def _uncached(self, row: int) -> list[int]:
        """The row's tokens to read next: those that the cache lacks. Cached tokens that differ are dropped.

        The last token is always read anew, for the logits after it, unless they are those after the prompt.
        """
        text, cached = self._rows[row], self._cached[row]
        same = min(text.unchanged, len(cached))
        tail = self._known(text.tokens[same:])
        same += next(
            (place for place, (old, new) in enumerate(zip(cached[same:], tail, strict=False)) if old != new),
            min(len(cached) - same, len(tail)),
        )
        same = max(self._prompt_lengths[row], min(same, len(text.tokens) - 1))
        del cached[same:]
        text.unchanged = len(text.tokens)
        return self._known(text.tokens[same:])

    def _rewind(self) -> None:
        self._reader.rewind(
            [len(tokens) - prompt for tokens, prompt in zip(self._cached, self._prompt_lengths, strict=True)]
        )

    def _forward(self, uncached: Sequence[list[int]], passes: list[int]) -> torch.Tensor:
        """Read tokens of some rows; `[batch, draft vocab]` logits after each row's text."""
        assert self._prompt_logits is not None
        reads = [bool(tokens) for tokens in uncached]
        tree = DraftTree.chains([tokens[1:] for tokens in uncached])
        passes.append(sum(reads) * (1 + tree.nodes))
        logits = self._reader.forward(tree, [tokens[0] if tokens else 0 for tokens in uncached], reads)
        self._reader.commit([list(range(len(tokens) - 1)) if tokens else None for tokens in uncached])
        for row, tokens in enumerate(uncached):
            self._cached[row] += tokens
        last = torch.tensor([max(0, len(tokens) - 1) for tokens in uncached], device=logits.device)
        after = logits[torch.arange(len(uncached), device=logits.device), last]
        return torch.where(torch.tensor(reads, device=logits.device)[:, None], after, self._prompt_logits)

    def _known(self, tokens: Sequence[int]) -> list[int]:
        return known_tokens(tokens, self._embedded)


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

    def __init__(
        self,
        target: Codec,
        draft: Codec,
        prompt: Sequence[int],
        shared: SharedVocabulary,
    ):
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
        known = [self._shared.draft_token(token) for token in new]
        translated = [token for token in known if token is not None]
        if len(translated) == len(new):
            self.tokens += translated
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
