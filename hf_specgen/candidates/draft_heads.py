"""Strategies with a draft head: EAGLE, P-EAGLE, block heads (DFlash, DSpark and others), MTP, Gemma 4, Medusa.

The head receives each accepted token with the hidden states that the target computed for it in verification, so
drafting costs no forward pass of a model and no second prefill by the target.

Sources: Li et al., "EAGLE" (2024), section 3; "EAGLE-2" (2024), section 4, for the trees; "EAGLE-3" (2025), section 3,
for the fused hidden states; P-EAGLE (2026), https://arxiv.org/abs/2602.01469; DFlash (2026),
https://arxiv.org/abs/2602.06036; JetSpec (2026), https://arxiv.org/abs/2606.18394; DeepSeek-AI, "DeepSeek-V3 Technical
Report" (2024), sections 2.2 and 5.4.3, for MTP; Google, "Gemma 4" (2026), as in `transformers.models.gemma4_assistant`;
Cai et al., "Medusa" (2024); Ankner et al., "Hydra" (2024), for heads that read the path.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_specgen import random_state
from hf_specgen.call import memory
from hf_specgen.candidates.base import Depth, DraftSession, PretrainedCandidates, TreeSetting
from hf_specgen.candidates.draft_batch import DraftBatch
from hf_specgen.candidates.draft_vocabulary import DraftVocabulary, check_vocabulary, restricted_head, vocabulary_ids
from hf_specgen.candidates.draft_window import DraftWindowSetting, check_window, draft_window
from hf_specgen.candidates.drafter_session import DrafterSession
from hf_specgen.candidates.features import FeatureQueue, LastStates
from hf_specgen.candidates.one_pass import default_tree
from hf_specgen.depth import Policy
from hf_specgen.heads.base import BoundHead, DraftHead
from hf_specgen.heads.block import BlockHead
from hf_specgen.heads.block_drafter import BlockDrafter, RotationChoice, SettingEvidence
from hf_specgen.heads.drafter import HeadDrafter
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head
from hf_specgen.heads.eagle_drafter import EagleDrafter
from hf_specgen.heads.gemma_assistant import AssistantDrafter, AssistantHead
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.layer_options import rotates_neighbours, with_neighbouring_pairs
from hf_specgen.heads.medusa import MedusaDrafter, MedusaHeads
from hf_specgen.heads.mtp import MTPHead, load_mtp
from hf_specgen.heads.mtp_drafter import LayeredDrafter
from hf_specgen.heads.path_head import PathDrafter, PathHead
from hf_specgen.targets.cuda_graphs import CAPTURES
from hf_specgen.targets.model_parts import output_matrix
from hf_specgen.targets.requirements import TargetRequirements
from hf_specgen.targets.target import Target

T = TypeVar("T")


class BoundModules(Generic[T]):
    """Modules that a strategy has loaded for its targets, once for each. May be shared by threads.

    A target that is freed takes its modules with it; one that is moved, cast or resized gets new ones.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a hook of a target may run another one
        self._loaded: WeakKeyDictionary[PreTrainedModel, tuple[tuple[Any, ...], T]] = WeakKeyDictionary()

    def on(self, model: PreTrainedModel, load: Callable[[], T]) -> T:
        """The modules for this target; `load` is called if there are none for its output matrix and embeddings.

        The random state is left unchanged: a new module initialises weights, which must not change what is sampled.
        """
        matrix = output_matrix(model)
        weight = matrix.weight
        if weight.device.type == "meta":
            raise ValueError(
                f"{type(model).__name__} has its output matrix offloaded, and draft heads use its weights; keep "
                "lm_head and the embeddings on a device (device_map), or use another candidate generator"
            )
        key = weight.dtype, weight.device, weight.shape, matrix, model.get_input_embeddings()
        with self._lock:
            loaded = self._loaded.get(model)
            if loaded is None or loaded[0] != key:
                with random_state.kept(weight.device):
                    loaded = key, load()
                self._loaded[model] = loaded
            return loaded[1]

    def __reduce__(self) -> tuple[type[BoundModules[T]], tuple[()]]:
        return BoundModules, ()


class HeadCandidates(PretrainedCandidates):
    """Base class of strategies with a draft head; a subclass sets the class attributes, and overrides `drafter_of`.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one.
        k, tree, policy: as for `Candidates`.
        aux_hidden_state_layers: which hidden states of the target the head reads, as indices into Transformers'
            `hidden_states`, instead of those that the checkpoint names.
        draft_window: how much of a long text the head reads, as for `DraftModelCandidates`.

    Raises:
        TypeError: if the head is neither a `DraftHead` nor a path.
        ValueError: if a number is out of range; at the first call, if the head does not fit the target.
    """

    drafter: str | DraftHead | None
    max_depth: int
    """Maximum depth of k="auto"."""
    head_classes: tuple[type[DraftHead], ...] = (DraftHead,)
    has_mask_token: bool | None = None
    expected = "a head"
    """Which heads the strategy drafts with: their classes, whether their config has a mask token; and in words."""
    has_draft_window = True
    """Whether the head reads the whole text, of which a window can be left."""
    latency_kind = "head"
    arguments = {**PretrainedCandidates.arguments, "aux_hidden_state_layers": None, "draft_window": "auto"}

    def __init__(
        self,
        head_or_path: DraftHead | str | Path,
        k: Depth = "auto",
        *,
        tree: TreeSetting = None,
        aux_hidden_state_layers: Sequence[int] | None = None,
        draft_window: DraftWindowSetting = "auto",
        policy: Policy | None = None,
    ):
        super().__init__(k, policy, tree=tree, max_k=self.max_depth)
        self.draft_window = check_window(draft_window)
        if not self.has_draft_window and draft_window not in ("auto", None):
            raise ValueError(
                f"draft_window={draft_window!r} has no effect, since {self.expected} reads the last hidden state "
                "alone; leave it out"
            )
        self.aux_hidden_state_layers = None if aux_hidden_state_layers is None else tuple(aux_hidden_state_layers)
        if not isinstance(head_or_path, (DraftHead, str, Path)):
            name = type(self).__name__
            raise TypeError(f"{name} takes a loaded head, a folder or a Hub id, got {head_or_path!r:.80}")
        self.drafter = str(head_or_path) if isinstance(head_or_path, Path) else head_or_path
        self._bound: BoundModules[BoundHead] = BoundModules()

    def begin(self, batch: DraftBatch, bound: BoundHead) -> DraftSession:
        """The session of a call."""
        window = draft_window(self.draft_window, bound.head.config, batch.state)
        drafter = self.drafter_of(batch, bound, FeatureQueue(batch, bound.aux_hidden_state_layers, window))
        return DrafterSession(batch, drafter, self.k, self.tree, warns_of_length=window is None)

    def drafter_of(self, batch: DraftBatch, bound: BoundHead, source: FeatureQueue) -> HeadDrafter:
        """The drafter of a head that reads the hidden states of all accepted tokens."""
        device = next(bound.head.parameters()).device.type
        captures = isinstance(bound.head, Eagle1Head | Eagle3Head) and device in CAPTURES
        captures = captures and not torch.is_autocast_enabled(device)
        return EagleDrafter(bound, source, batch.state.batch, batch.call.settings.compile if captures else False)

    def load(self, model: PreTrainedModel) -> DraftHead:
        """The head, on the CPU; a copy of one that was given loaded."""
        return copy.deepcopy(self.drafter) if isinstance(self.drafter, DraftHead) else load_head(str(self.drafter))

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        return TargetRequirements(self._on(model).aux_hidden_state_layers)

    def start(self, batch: DraftBatch) -> DraftSession:
        return self.begin(batch, self._on(batch.model))

    def _on(self, model: PreTrainedModel) -> BoundHead:
        """The head on its target, in its dtype on its device."""
        return self._bound.on(model, lambda: self._bind(model))

    def _bind(self, model: PreTrainedModel) -> BoundHead:
        head = self.load(model)
        has_mask = getattr(head.config, "mask_token_id", None) is not None
        if not isinstance(head, self.head_classes) or self.has_mask_token not in (None, has_mask):
            raise ValueError(
                f"{self!r} was given {type(head).__name__}, not {self.expected}; use AutoCandidates.from_pretrained, "
                "which chooses the strategy"
            )
        weight = output_matrix(model).weight
        return head.to(device=weight.device, dtype=weight.dtype).eval().bind(model, self.aux_hidden_state_layers)


class EagleCandidates(HeadCandidates):
    """Drafts with an EAGLE head, one token or one tree level at a time.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one: EAGLE-1, EAGLE-2, EAGLE-3, EAGLE-3.1 and HASS in the
            original format, in that of SpecForge, ModelOpt and DeepSpec, and the `eagle3` format of speculators.
        k, tree, aux_hidden_state_layers, draft_window, policy: as for `HeadCandidates`.

    Example:
        >>> EagleCandidates("org/eagle3-head", k=4)
        EagleCandidates('org/eagle3-head', k=4)
    """

    max_depth = 32
    """With the depth 8 of EAGLE-3's trees the projected speed of the bundled head is 0.9 of that with 16, which is 0.96
    of that with 32: text of which the head is nearly certain is accepted to a greater depth."""
    head_classes = (Eagle1Head, Eagle3Head)
    has_mask_token = False
    expected = "an EAGLE head without the mask token of P-EAGLE"


class PEagleCandidates(HeadCandidates):
    """Drafts with a P-EAGLE head: all draft tokens in the pass over the accepted ones, with mask tokens after them.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one: vLLM's layout with `mask_hidden`, and the `peagle`
            format of speculators.
        k, tree, aux_hidden_state_layers, draft_window, policy: as for `HeadCandidates`.

    Example:
        >>> PEagleCandidates("org/peagle-head", k=5)
        PEagleCandidates('org/peagle-head', k=5)
    """

    max_depth = 8
    """Published heads were trained to draft 5 to 8 tokens."""
    head_classes = (Eagle3Head,)
    has_mask_token = True
    expected = "a P-EAGLE head"


AMBIGUOUS_SETTINGS = {
    "layout": ("the first position of a block proposes a token", "the second position is the first to propose"),
    "rotation": ("halves of each attention head are rotated", "neighbouring channels are rotated, as in the target"),
}
"""Settings that the config.json of a block head may leave out, each with both values that it can have."""


class DFlashCandidates(HeadCandidates):
    """Drafts with a block head (DFlash, JetSpec, DSpark, DFlash2, Domino, LiLiCorr): a block of tokens in one pass.

    Args:
        head_or_path: a loaded head, or a folder or Hub id of one: DFlash and DFlash2 of z-lab, JetSpec, DSpark of
            DeepSpec and SpecForge, Domino, LiLiCorr, and the formats `dflash`, `dflash2` and `dspark` of speculators.
        k, tree, aux_hidden_state_layers, draft_window, policy: as for `HeadCandidates`; a draft is at most as long as
            the block.

    Example:
        >>> DFlashCandidates("org/dflash-head", k=7, tree=32)
        DFlashCandidates('org/dflash-head', k=7, tree=32)
    """

    max_depth = 16
    """Published heads have blocks of 8 to 16 tokens."""
    head_classes = (BlockHead,)
    expected = "a block head (DFlash, JetSpec, DSpark, DFlash2, Domino, LiLiCorr)"

    def drafter_of(self, batch: DraftBatch, bound: BoundHead, source: FeatureQueue) -> HeadDrafter:
        head = cast(BlockHead, bound.head)
        if isinstance(head, PathHead):
            layout = self._evidence(batch, "layout") if head.config.layout_undecided else None
            drafter: BlockDrafter = PathDrafter(bound, source, batch.state.batch, layout)
        else:
            drafter = BlockDrafter(bound, source, batch.state.batch)
        if head.config.pairs_undecided and rotates_neighbours(batch.model):
            drafter.rotation = RotationChoice(with_neighbouring_pairs(head), self._evidence(batch, "rotation"))
        return drafter

    def _evidence(self, batch: DraftBatch, setting: str) -> SettingEvidence:
        """What earlier calls have inferred of a setting that the config.json of the head leaves out."""
        key = setting, batch.call.drafting.key
        model = batch.model if batch.carries_over else None
        evidence = memory.recall(model, key, SettingEvidence)
        memory.store(model, key, evidence)  # now, so that calls side by side share it
        return evidence

    def inferred_settings(self, model: PreTrainedModel) -> list[str]:
        """The settings that config.json leaves out and texts have decided, in words; for `hf-specgen doctor`."""
        inferred = []
        for setting, (first, second) in AMBIGUOUS_SETTINGS.items():
            lead = memory.recall(model, (setting, self.profile_key()), SettingEvidence).lead
            if lead:
                inferred.append(f"{second if lead > 0 else first} ({abs(lead)} more correct tokens)")
        return inferred


class MTPCandidates(HeadCandidates):
    """Drafts with multi-token prediction layers, mostly those in the target's own checkpoint.

    A single layer is applied to its own output again for each further token, like an EAGLE head; of several layers,
    each drafts one token.

    Args:
        checkpoint: folder or Hub id of the target's checkpoint, or of a head in the `mtp` format of speculators; left
            out, it is where the target was loaded from.
        draft_vocabulary: which tokens are drafted, as for `DraftModelCandidates`.
        k, settings: `k`, `tree`, `aux_hidden_state_layers`, `draft_window`, `policy`, as for `HeadCandidates`.

    Example:
        >>> MTPCandidates(k=2)
        MTPCandidates(k=2)
    """

    max_depth = 4
    """The layer was trained to predict one token; further ones are less accurate."""
    head_classes = (MTPHead,)
    expected = "MTP layers"
    arguments = {**HeadCandidates.arguments, "draft_vocabulary": None}

    def __init__(
        self,
        checkpoint: str | Path | None = None,
        k: Depth = "auto",
        *,
        draft_vocabulary: DraftVocabulary = None,
        **settings: Any,
    ):
        super().__init__("" if checkpoint is None else checkpoint, k, **settings)
        self.drafter = None if checkpoint is None else str(checkpoint)
        self.draft_vocabulary = check_vocabulary(draft_vocabulary)
        self._restricted: BoundModules[BoundHead] = BoundModules()

    def load(self, model: PreTrainedModel) -> DraftHead:
        """The layer, from the checkpoint."""
        return load_mtp(model, cast(str | None, self.drafter))

    def begin(self, batch: DraftBatch, bound: BoundHead) -> DraftSession:
        full = bound
        if (vocabulary := self.draft_vocabulary) is not None:
            ids = vocabulary_ids(vocabulary, batch.state.prompts, bound.head.config.draft_vocab_size)
            bound = self._restricted.on(batch.model, lambda: restricted_head(full, ids))
        return super().begin(batch, bound)

    def drafter_of(self, batch: DraftBatch, bound: BoundHead, source: FeatureQueue) -> HeadDrafter:
        if len(cast(MTPHead, bound.head).layers) == 1:
            return super().drafter_of(batch, bound, source)
        return LayeredDrafter(bound, source, batch.state.batch)


class GemmaAssistantCandidates(HeadCandidates):
    """Drafts with a Gemma 4 assistant: a small model that attends to the keys and values of its target.

    Args:
        head_or_path: a loaded assistant, or a folder or Hub id of one.
        k, tree, aux_hidden_state_layers, policy: as for `HeadCandidates`; there is no `draft_window`.

    Example:
        >>> GemmaAssistantCandidates("google/gemma-4-E2B-it-assistant", k=4)
        GemmaAssistantCandidates('google/gemma-4-E2B-it-assistant', k=4)
    """

    max_depth = 8
    """Without a cache, one hidden state and the last token stand for all draft tokens."""
    head_classes = (AssistantHead,)
    expected = "a Gemma 4 assistant"
    has_draft_window = False

    def target_requirements(self, model: PreTrainedModel) -> TargetRequirements:
        return replace(super().target_requirements(model), reads_cache=True)

    def begin(self, batch: DraftBatch, bound: BoundHead) -> DraftSession:
        source = LastStates(batch, bound.aux_hidden_state_layers)
        drafter = AssistantDrafter(bound, source, cast(Target, batch.target))
        return DrafterSession(batch, drafter, self.k, self.tree)


class MedusaCandidates(HeadCandidates):
    """Drafts with Medusa heads: all depths at once, or with heads that read the path (Hydra) level by level.

    Args:
        head_or_path: loaded heads, or a folder or Hub id of heads: our own format, Medusa v1 and v2, TGI, vLLM.
        k, tree, aux_hidden_state_layers, policy: as for `HeadCandidates`; a draft is at most as deep as there are
            heads. There is no `draft_window`.

    Example:
        >>> MedusaCandidates("org/medusa-heads", k=3, tree=16)
        MedusaCandidates('org/medusa-heads', k=3, tree=16)
    """

    max_depth = 8
    """Published sets have at most 5 heads."""
    head_classes = (MedusaHeads,)
    expected = "a set of Medusa heads"
    has_draft_window = False
    latency_kind = "medusa"

    def begin(self, batch: DraftBatch, bound: BoundHead) -> DraftSession:
        source = LastStates(batch, bound.aux_hidden_state_layers)
        drafter = MedusaDrafter(bound, source, batch.model)
        return DrafterSession(batch, drafter, self.k, default_tree(batch, self.tree))
