"""A smaller model guesses: it reads what the target has read and writes a few tokens ahead.

The draft keeps a per-row cache of its own from step to step. After a rejection it forgets the rejected tokens, nothing
else, and reads at most two new ones: the target's own token, and its own last guess if that one was accepted too.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023); Chen et al. (2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from hf_specgen import compat
from hf_specgen.candidates.autoregressive import AutoregressiveSession, vocabulary_size
from hf_specgen.candidates.base import Candidates, Depth, DraftSession
from hf_specgen.candidates.vocabulary import check_vocabularies
from hf_specgen.depth import Policy
from hf_specgen.state import Call
from hf_specgen.target.base import Target
from hf_specgen.target.support import check_model
from hf_specgen.tree import DraftTree
from hf_specgen.verification import VerificationResult


class DraftModelCandidates(Candidates):
    """Guesses with a small model of the same tokenizer.

    Args:
        model_or_id: a loaded model, a Hub id or a folder.
        k: greatest length of a draft, in tokens; "auto" for as many as pay.
        confidence_threshold: stop a row's draft behind a token whose probability is below this; 0 never stops.
        dtype, device, quantization_config: how to load a draft that is given by name; by default in the dtype of its
            checkpoint, on the target's device. int8: Transformers' `TorchAoConfig` around torchao's
            `Int8WeightOnlyConfig()`.
        policy: how much of k is used, step by step; see `hf_specgen.depth`.

    Raises:
        ValueError: if a number is out of range, or loading options are given for a model that is loaded already; at
            the first call, if the draft cannot go with the target.

    Example:
        >>> DraftModelCandidates("org/small-model", k=4)
        DraftModelCandidates('org/small-model', k=4, confidence_threshold=0.0)
    """

    def __init__(
        self,
        model_or_id: PreTrainedModel | str,
        k: Depth = "auto",
        *,
        confidence_threshold: float = 0.0,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        quantization_config: Any = None,
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, max_k=8)
        if not 0 <= confidence_threshold < 1:
            raise ValueError(f"confidence_threshold must be at least 0 and below 1, got {confidence_threshold}")
        loaded = not isinstance(model_or_id, str)
        if loaded and (dtype != "auto" or device is not None or quantization_config is not None):
            raise ValueError("dtype, device and quantization_config are for a draft given by name; this one is loaded")
        self.confidence_threshold = confidence_threshold
        self._name = model_or_id if isinstance(model_or_id, str) else str(model_or_id.name_or_path)
        self._model = None if isinstance(model_or_id, str) else model_or_id
        self._loading = {"dtype": dtype, "device_map": device, "quantization_config": quantization_config}

    def start(self, call: Call) -> DraftSession:
        draft = self._load(call.model)
        check_model(draft)
        if call.model is not None:
            check_vocabularies(draft, call.model)
        return _DraftModelSession(self, draft, call)

    def profile_key(self) -> tuple[str | int | float | bool, ...]:
        return (type(self).__qualname__, self._name, self.k, self.confidence_threshold)

    def _load(self, target: PreTrainedModel | None) -> PreTrainedModel:
        if self._model is None:
            options = {name: value for name, value in self._loading.items() if value is not None}
            if target is not None:
                options.setdefault("device_map", target.device)
            self._model = AutoModelForCausalLM.from_pretrained(self._name, **options)
        return self._model.eval()

    def __repr__(self) -> str:
        settings = f"k={self.k}, confidence_threshold={self.confidence_threshold}{self._show_policy()}"
        return f"DraftModelCandidates({self._name!r}, {settings})"


class _DraftModelSession(AutoregressiveSession):
    """`_read[b]` generated tokens of row b are in the draft's cache."""

    def __init__(self, settings: DraftModelCandidates, draft: PreTrainedModel, call: Call):
        super().__init__(call, settings.k, settings.confidence_threshold, vocabulary_size(call.model or draft))
        state = self._state = call.state
        self._readable = int(cast(Any, draft.get_input_embeddings()).weight.shape[0])
        self._table = int(getattr(draft.config.get_text_config(), "max_position_embeddings", None) or 2**31)
        longest = max(map(len, state.prompts))
        if longest > self._table:
            raise ValueError(
                f"the prompt has {longest} tokens, but the draft reads at most {self._table}; use another draft"
            )
        input_ids, mask = _left_padded([self._known(prompt) for prompt in state.prompts], draft.device)
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        arguments = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
        if compat.supports_logits_to_keep(draft):
            arguments["logits_to_keep"] = 1  # the logits of a long prompt would take gigabytes
        chunk_size = call.config.prefill_chunk_size
        self._draft = Target(draft, input_ids, GenerationConfig(prefill_chunk_size=chunk_size), arguments)
        self._has_read_prompt = False
        self._read = [0] * state.batch
        self._reads = [True] * state.batch

    def room(self, row: int) -> int:
        """How much the draft's own positions leave for a draft."""
        return max(0, self._table - len(self._state.prompts[row]) - len(self._state.generated[row]))

    def first_scores(self) -> torch.Tensor:
        """Read what was generated since the last draft, in the rows that draft now and that positions are left for.

        The prompt is read before the first draft: a call that never drafts does not pay for it.
        """
        if not self._has_read_prompt:
            logits = self._draft.prefill(DraftTree.empty(len(self._read)))
            self._has_read_prompt = True
            if not any(self._state.generated):
                return logits[:, -1]
        rows = range(len(self._read))
        self._draft.drop_rows([not self._state.has_ended(row) for row in rows])
        self._reads = [self.budget[row] > 0 and self.room(row) > 0 for row in rows]
        texts = zip(self._state.generated, self._read, self._reads, strict=True)
        unread = [self._known(text[read:] if reads else text[-1:]) for text, read, reads in texts]
        tree = DraftTree.chains([tokens[1:] for tokens in unread])
        logits = self._draft.forward(tree, [tokens[0] for tokens in unread], self._reads)
        self._keep([list(range(len(tokens) - 1)) for tokens in unread], self._reads)
        last = torch.tensor([len(tokens) - 1 for tokens in unread], device=logits.device)
        return logits[torch.arange(len(unread), device=logits.device), last]

    def next_scores(self, tokens: torch.Tensor) -> torch.Tensor:
        """Read the last guess of each row."""
        reads = [read and self.drafted < self.room(row) for row, read in enumerate(self._reads)]
        logits = self._draft.forward(DraftTree.empty(len(tokens)), tokens, reads)
        self._keep([[]] * len(tokens), reads)
        return logits[:, -1]

    def _keep(self, paths: Sequence[list[int]], reads: list[bool]) -> None:
        self._draft.commit([path if keeps else None for path, keeps in zip(paths, reads, strict=True)])

    def _known(self, tokens: list[int]) -> list[int]:
        """A token from the padding of a larger target's table cannot be read; what stands for it is only a guess."""
        return [token if token < self._readable else 0 for token in tokens]

    def observe(self, result: VerificationResult) -> None:
        """Forget the rejected tokens. What was accepted has been read already, but for the last token drafted."""
        if self.drafted == 0:
            return
        for row, path in enumerate(result.paths):
            if path is not None and self._reads[row]:
                before = len(self._state.generated[row]) - len(result.tokens[row])
                read = before + min(len(path), self.drafted - 1)
                self._read[row] = min(read, self._table - len(self._state.prompts[row]) - 1)
        self._draft.rewind(self._read)


def _left_padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)
