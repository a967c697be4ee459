"""Gemma 4 assistants: a stack without keys and values of its own, which attends to the target's; loader and drafter.

Every layer reads the keys and values that the target's last full-attention layer, or its last sliding one, has in its
cache. All draft tokens of a step have the position of the last known token, and influence later ones only through the
state that is passed on. The layers are those of Transformers; the masks are our own, as rows differ in length.

Source: Google, "Gemma 4" (2026), as implemented by `transformers.models.gemma4_assistant`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from transformers import Gemma4TextConfig, PretrainedConfig, PreTrainedModel

from hf_specgen.device_tree import Frontier
from hf_specgen.drafter import Drafter
from hf_specgen.heads.base import BoundHead, DraftHead, HeadConfig, HeadOutput
from hf_specgen.heads.head_file import HeadFile, count_layers
from hf_specgen.heads.head_text import StateSource, StateText
from hf_specgen.heads.source import first_line
from hf_specgen.targets.model_parts import decoder_layers
from hf_specgen.targets.row_layout import scatter_rows
from hf_specgen.targets.target import Target

MODEL_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")
RENAMED = {
    "model.embed_tokens.weight": "lm_head.weight",
    "masked_embedding.centroids.weight": "lm_head.centroids.weight",
    "masked_embedding.token_ordering": "lm_head.token_ordering",
}
KeysValues = Mapping[str, tuple[torch.Tensor, torch.Tensor]]
"""By layer type keys and values, each `[batch, kv_heads, length, head_dim]`."""


class SharedTextConfig(Gemma4TextConfig):
    """Config of layers that reuse the target's keys and values; in Transformers 5.23 `kv_sharing_modes` raises."""

    kv_sharing_modes = property(lambda self: ["reuse"] * self.num_hidden_layers)


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(HeadConfig):
    """Configuration of `AssistantHead`; `hidden_size` is the target's, which the passed-on states have."""

    text: SharedTextConfig  # of the layers
    num_centroids: int | None = None  # groups of tokens, of which the best are scored; None: all tokens
    top_centroids: int = 0  # how many groups are scored


class CentroidOutput(nn.Module):
    """An output matrix that scores only the tokens of the best few groups; all others get a lower score."""

    token_ordering: torch.Tensor
    """`[vocab]` token ids, group by group."""

    def __init__(self, hidden_size: int, vocab_size: int, num_centroids: int, top: int) -> None:
        super().__init__()
        if vocab_size % num_centroids or top > num_centroids:
            raise ValueError(
                f"{vocab_size} tokens cannot be divided by {num_centroids} centroids, of which {top} count"
            )
        self.top = top
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))
        self.centroids = nn.Linear(hidden_size, num_centroids, bias=False)
        self.register_buffer("token_ordering", torch.arange(vocab_size))

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """`[..., hidden]` to `[..., vocab]`."""
        groups = self.token_ordering.view(self.centroids.out_features, -1)
        tokens = groups[self.centroids(states).topk(self.top, dim=-1).indices].flatten(-2)
        scores = (self.weight[tokens] @ states[..., None])[..., 0]
        rest = scores.amin(dim=-1, keepdim=True) - 1
        logits = rest.expand(*rest.shape[:-1], self.weight.shape[0]).clone()
        return logits.scatter_(-1, tokens, scores)


class AssistantHead(DraftHead):
    """A Gemma 4 assistant, with the layers of Transformers' text model."""

    config: AssistantConfig

    def __init__(self, config: AssistantConfig) -> None:
        from transformers import Gemma4TextModel  # imported only where it is needed: it takes long

        super().__init__(config)
        width = config.text.hidden_size
        self.pre_projection = nn.Linear(2 * config.hidden_size, width, bias=False)
        self.post_projection = nn.Linear(width, config.hidden_size, bias=False)
        self.model = Gemma4TextModel(config.text)
        del self.model.embed_tokens  # it reads states
        if config.num_centroids is None:
            self.lm_head = nn.Linear(width, config.vocab_size, bias=False)
        else:
            self.lm_head = CentroidOutput(width, config.vocab_size, config.num_centroids, config.top_centroids)

    def forward(
        self,
        embeddings: torch.Tensor,
        hidden: torch.Tensor,
        position_ids: torch.Tensor,
        keys_values: KeysValues,
        lengths: torch.Tensor,
        padding: torch.Tensor,
        dropped: Mapping[str, int],
    ) -> HeadOutput:
        """One draft step with the target's keys and values; positions are those of the last known token.

        `lengths` and `padding` are, for each row, the keys that count and how many of the first ones are padding.
        `dropped` is by layer type how many of the first keys the cache has dropped; they count in `lengths`.
        """
        masks = {}
        model = cast(Any, self.model)
        for name, (keys, _) in keys_values.items():
            slots = dropped[name] + torch.arange(keys.shape[2], device=lengths.device)
            visible = (slots < lengths[:, None]) & (slots >= padding[:, None])
            if name == "sliding_attention":
                visible &= slots >= lengths[:, None] - 1 - model.config.sliding_window
            masks[name] = visible[:, None, None].expand(-1, -1, embeddings.shape[1], -1)
        output = model(
            inputs_embeds=self.pre_projection(torch.cat((embeddings, hidden), dim=-1)),
            position_ids=position_ids,
            attention_mask=masks,
            shared_kv_states=dict(keys_values),
            logits_to_keep=torch.arange(embeddings.shape[1]),  # with a number the layers would leave out positions
            use_cache=False,
        ).last_hidden_state
        return HeadOutput(self.post_projection(output), output)

    def bind(self, target: PreTrainedModel, aux_hidden_state_layers: Sequence[int] | None = None) -> BoundHead:
        """As of every head; also checks that the layers can read the target's keys."""
        layers = decoder_layers(target)
        kinds = source_layers(target.config)
        for own in (layer.self_attn for layer in cast(Any, self.model).layers):
            source: Any = layers[kinds[own.layer_type]].self_attn if own.layer_type in kinds else None
            found = None if source is None else (source.k_proj.out_features // source.head_dim, source.head_dim)
            heads = own.q_proj.out_features // own.head_dim
            if found is None or own.head_dim != found[1] or own.num_key_value_groups * found[0] != heads:
                raise ValueError(
                    f"the {own.layer_type} of the assistant reads keys of size {own.head_dim}, shared by "
                    f"{own.num_key_value_groups} of its {heads} heads (num_key_value_heads), but those of this target "
                    f"have {'no such layer' if found is None else f'{found[0]} heads of size {found[1]}'}; load the "
                    "assistant that belongs to it"
                )
        return super().bind(target, aux_hidden_state_layers)


def source_layers(target_config: PretrainedConfig) -> dict[str, int]:
    """For each layer type the target's last layer with keys and values of its own, which an assistant reads."""
    config: Any = target_config.get_text_config()
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    return {name: index for index, name in enumerate((getattr(config, "layer_types", None) or ())[:own])}


def load_assistant(file: HeadFile) -> AssistantHead:
    """A Gemma 4 assistant, with or without centroids. A copy of the embeddings in the file is not read."""
    file.tensors = {RENAMED.get(name, name): info for name, info in file.tensors.items() if name != "lm_head.weight"}
    fields = file.fields
    text = fields.nested("text_config")
    ordered = fields.flag("use_ordered_embeddings")
    count_layers(text, [name.removeprefix("model.") for name in file.tensors])
    hidden = fields.integer("backbone_hidden_size")
    vocab = text.integer("vocab_size")
    reads_target = {"num_kv_shared_layers": text.integer("num_hidden_layers"), "attn_implementation": "sdpa"}
    try:
        shared = SharedTextConfig(**{**text.values, **reads_target})
    except Exception as error:  # whatever Transformers raises for values that it cannot work with
        raise ValueError(f"text_config cannot be used ({first_line(error)})") from None
    for rope in (shared.rope_parameters or {}).values():  # of each layer type; its tables are computed as it says
        factor = rope.get("partial_rotary_factor") if isinstance(rope, dict) else None
        if factor is not None and not (isinstance(factor, int | float) and 0 < factor <= 1):
            raise ValueError(f"partial_rotary_factor must be above 0 and at most 1, got {factor!r}")
    config = AssistantConfig(
        hidden_size=hidden,
        vocab_size=vocab,
        draft_vocab_size=vocab,
        target_hidden_size=hidden,
        own_lm_head=True,
        text=shared,
        num_centroids=fields.integer("num_centroids") if ordered else None,
        top_centroids=fields.integer("centroid_intermediate_top_k") if ordered else 0,
    )
    head = file.build(AssistantHead, config)
    model: Any = head.model  # was built on "meta"; its frequencies are computed, once the sizes have been checked
    model.rotary_emb = type(model.rotary_emb)(config.text)
    return head


def is_assistant(file: HeadFile) -> bool:
    """Whether the config is that of an assistant."""
    return file.fields.get("model_type") in MODEL_TYPES


class AssistantDrafter(Drafter[StateText]):
    """Drafts with a Gemma 4 assistant: with the target's own keys and values, and no cache of its own."""

    def __init__(self, bound: BoundHead, source: StateSource, target: Target):
        super().__init__()
        self.bound = bound
        self.modules = (bound.head, bound.output_matrix)
        self._source = source
        self._target = target
        self._layers_read = source_layers(target.model.config)
        self._like = next(bound.head.parameters())
        self._hidden = self._like.new_zeros(0)

    def take_uncached(self, max_depths: Sequence[int]) -> StateText | None:
        """The state and the last token of each row."""
        return self._source.states_for(max_depths)

    def forward_text(self, text: StateText) -> torch.Tensor:
        """`[batch, vocab]` logits after each row's last token; earlier draft tokens are dropped."""
        rows = list(text.rows)
        pending = torch.tensor([[text.pending[row]] for row in rows])
        logits = self._run(pending, text.states[rows][:, None].to(self._like))
        return scatter_rows(logits[:, 0], rows, len(text.pending))

    def forward_nodes(self, frontier: Frontier) -> torch.Tensor:
        """`[batch, new, vocab]` logits after the last nodes of a tree."""
        active = frontier.select(self._target.rows)
        logits = self._run(active.tokens.to(self._like.device), active.gather_parents(self._hidden))
        return scatter_rows(logits, self._target.rows, frontier.batch)

    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[rows, length, vocab]` of one pass; `tokens` `[rows, length]`, `hidden` `[rows, length, hidden]`."""
        device = self._like.device
        filled = max(self._target.cache.lengths)
        lengths = torch.tensor(self._target.cache.lengths, device=device)
        padding = torch.tensor(self._target.padding, device=device)
        layers: dict[str, Any] = {name: self._target.cache.layers[index] for name, index in self._layers_read.items()}
        dropped = {name: layer.first for name, layer in layers.items()}
        shared: KeysValues = {
            name: tuple(part[:, :, : filled - layer.first].to(self._like) for part in (layer.keys, layer.values))
            for name, layer in layers.items()
        }
        positions = (lengths - padding)[:, None].expand(tokens.shape)
        output = self.bound.head(self.bound.embed(tokens), hidden, positions, shared, lengths, padding, dropped)
        self._hidden = output.hidden
        return self.bound.target_logits(output.output)
