"""Uno: the target drafts by itself, in one pass over noise tokens to which a LoRA adapter of it is applied.

    token        x(n)         noise           noise           noise       the last token, then random ones
    weights      target       with LoRA       with LoRA       with LoRA
    predicts     x(n+1)       x(n+2)          x(n+3)          x(n+4)

Attention is causal, so the first prediction is the target's own, whatever the noise; the others are independent of each
other. The cache entries of the pass are dropped, and the verification computes those of the draft anew.

Source: Uno (2026), as implemented by SGLang (https://github.com/sgl-project/sglang/pull/37667).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedModel

from hf_specgen import compat, random_state
from hf_specgen.candidates.base import Depth, DraftSession, PretrainedCandidates, TreeSetting, vocabulary_size
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_heads import BoundModules
from hf_specgen.candidates.drafter_session import DrafterSession
from hf_specgen.depth import Policy
from hf_specgen.drafter import DepthLogits, Drafter
from hf_specgen.heads.checkpoint import load_adapter
from hf_specgen.heads.head_text import HeadText
from hf_specgen.heads.source import Source
from hf_specgen.targets.fingerprint import computation
from hf_specgen.targets.hooks import thread_hooks, treats_rows_alike
from hf_specgen.targets.model_parts import keeps_state
from hf_specgen.targets.requirements import TargetRequirements, check_decoder_only
from hf_specgen.targets.self_check import short_text
from hf_specgen.tree import DraftTree

Matrices = Mapping[nn.Module, tuple[torch.Tensor, torch.Tensor]]
"""Of linear layers of the target the matrices A `[rank, in]` and B `[out, rank]` of the adapter, B scaled."""


class UnoCandidates(PretrainedCandidates):
    """Drafts with the target and a LoRA adapter that was trained to predict a block of tokens from noise (Uno).

    Args:
        adapter: folder or Hub id of the adapter, in PEFT's format.
        k, tree, policy: as for `Candidates`.

    Raises:
        ValueError: if a number is out of range; at the first call, if the adapter does not fit the target, or the
            target has recurrent states.

    Example:
        >>> UnoCandidates("org/uno-adapter", k=8)
        UnoCandidates('org/uno-adapter', k=8)
    """

    latency_kind = "uno"

    def __init__(
        self, adapter: str | Path, k: Depth = "auto", *, tree: TreeSetting = None, policy: Policy | None = None
    ):
        super().__init__(k, policy, tree=tree, max_k=8)
        if not isinstance(adapter, str | Path):
            raise TypeError(f"UnoCandidates takes a folder or a Hub id of an adapter, got {adapter!r:.80}")
        self.drafter = str(adapter)
        self._adapters: BoundModules[_Adapter] = BoundModules()

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        check_decoder_only(model, "UnoCandidates")
        if keeps_state(model.config.get_text_config()):
            raise ValueError(
                f"{type(model).__name__} has layers with convolutions or recurrent states, which would read the noise "
                "of UnoCandidates before the draft; use another candidate generator"
            )
        adapter = self._adapter_on(model)
        if treats_rows_alike(model):
            adapter.check_layers(model, rows=1)
        return TargetRequirements(reads_cache=True)

    def start(self, batch: DraftBatch) -> DraftSession:
        adapter = self._adapter_on(batch.model)
        adapter.check_layers(batch.model, batch.state.batch)
        return DrafterSession(batch, UnoDrafter(batch, adapter.matrices), self.k, self.tree)

    def _adapter_on(self, model: PreTrainedModel) -> _Adapter:
        """The adapter for this target."""
        return self._adapters.on(model, lambda: _Adapter(_load(model, str(self.drafter))))


class _Adapter:
    """The matrices of an adapter, and for which states of the target its layers have been checked."""

    def __init__(self, matrices: Matrices):
        self.matrices = matrices
        self._checked: tuple[Hashable, ...] | None = None

    def check_layers(self, model: PreTrainedModel, rows: int) -> None:
        """Raise if a layer cannot draft; a model with hooks is checked for its present ones and `rows` rows."""
        state: tuple[Hashable, ...] = () if treats_rows_alike(model) else (rows, *computation(model))
        if self._checked != state:
            _check_layers(model, self.matrices, rows)
            self._checked = state


def _load(model: PreTrainedModel, adapter: str) -> Matrices:
    """The matrices of an adapter, each in the dtype of the target and where its layer is."""
    tensors = load_adapter(model, Source(adapter))
    matrices = {}
    for name in {key.rpartition(".lora_")[0] for key in tensors}:
        layer: Any = model.get_submodule(name)
        if type(layer) is not nn.Linear and type(layer).__module__.startswith("transformers.models."):  # of experts
            raise ValueError(
                f"the adapter changes {name}, a {type(layer).__name__}, which returns more than a linear layer does; "
                "use another candidate generator"
            )
        down, up = (tensors[f"{name}.lora_{part}.weight"].to(layer.weight.device, model.dtype) for part in "AB")
        matrices[layer] = down, up
    return matrices


@torch.no_grad()
def _check_layers(model: PreTrainedModel, matrices: Matrices, rows: int) -> None:
    """Raise if a layer reads other tokens than those of a pass, as one does that expands the states in the cache."""
    read: dict[nn.Module, int] = {}

    def note(layer: nn.Module, inputs: tuple[torch.Tensor, ...], kwargs: Any) -> None:
        read[layer] = inputs[0].shape[:-1].numel()

    # A model in training mode draws random numbers, before it is refused.
    with random_state.kept(compat.input_device(model)), thread_hooks(matrices, before=note):
        # The last pass of plain decoding is over one token of each row.
        input_ids, config, arguments = short_text(model, rows, is_padded=False)
        cache = DynamicCache(config=model.config.get_text_config())
        compat.decode_plainly(model, input_ids, config, 2, {**arguments, compat.CACHE: cache})
    names = {layer: name for name, layer in model.named_modules()}
    if expanding := [names[layer] for layer, tokens in read.items() if tokens != rows]:
        raise ValueError(
            f"the adapter changes {expanding[0]}, which reads other tokens than those of a pass; use another candidate "
            "generator"
        )


class UnoDrafter(Drafter[HeadText]):
    """Drafts with the target of a call and an adapter; the noise is drawn from a generator of its own."""

    is_one_pass = True

    def __init__(self, batch: DraftBatch, matrices: Matrices):
        super().__init__()
        self._batch = batch
        self._matrices = matrices
        self._noise = torch.Generator().manual_seed(0)

    def take_uncached(self, max_depths: Sequence[int]) -> HeadText | None:
        """The depths of a draft; None if no row drafts."""
        if not any(max_depths):
            return None
        active = self._batch.is_active()
        return HeadText([], [], active, max_depths, [sum(active) * max(max_depths)])

    def forward_depths(self, text: HeadText, depth: int) -> DepthLogits:
        """One pass of the target over each row's last token and `depth - 1` tokens of noise."""
        target: Any = self._batch.target
        pending = self._batch.state.pending()
        vocab = vocabulary_size(self._batch.model)
        noise = torch.randint(vocab, (len(pending), depth - 1), generator=self._noise).tolist()
        with adapted(self._matrices, len(target.rows), depth):
            logits = target.forward_without_commit(DraftTree.chains(noise), pending, text.active)
        return DepthLogits(logits.float()[:, :, None])


def adapted(matrices: Matrices, rows: int, length: int) -> AbstractContextManager[None]:
    """A context in which passes of this thread over `length` tokens of each row add the adapter to all but the first.

    Layers may read the tokens of all rows one after the other, as routers of experts do; but no other number of them.
    """

    def add(layer: nn.Module, inputs: tuple[torch.Tensor, ...], kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        if inputs[0].shape[:-1].numel() != rows * length:
            problem = f"the adapter of UnoCandidates changes a layer that reads {tuple(inputs[0].shape)}"
            raise ValueError(f"{problem} instead of {length} tokens of each row; use another candidate generator")
        down, up = matrices[layer]
        states, plain = (part.reshape(rows, length, -1) for part in (inputs[0], output))
        added = linear(linear(states[:, 1:], down), up)
        return torch.cat((plain[:, :1], plain[:, 1:] + added), dim=1).view(output.shape)

    return thread_hooks(matrices, after=add)
