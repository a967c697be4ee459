"""Medusa heads: small networks that predict the tokens after the next one from the target's last hidden state.

    hidden state that predicts token t+1 ─┬─► target's output matrix ─► token t+1   (the target itself)
                                          └─► head 0 ─► output matrix ─► token t+2; head 1 ─► …

With `reads_path` (Hydra heads) head h also reads the draft tokens before its own, and drafts one level of a tree:

    that state, tokens t+1 … t+h+1 of a path ─► head h ─► output matrix ─► token t+h+2 of this path

All heads share the target's output matrix unless the checkpoint has one per head.

Source: Cai et al., "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads" (2024), section
2.1, and 2.3.3 for acceptance by rank; by confidence: Li et al., "EAGLE-2" (2024), section 4.1; `reads_path`: Ankner et
al., "Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding" (2024), section 3.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from hf_specgen.heads.lora import stacked_deltas
from hf_specgen.targets.model_parts import decoder_layers, output_logits, output_matrix

CONFIDENCE_EDGES = (0.2, 0.4, 0.6, 0.8, 0.95)
"""Probabilities between the bins of confidence."""
RANKS = 10
"""Tokens of each head that are counted: the tenth of head 0 of the embedded heads is accepted in about 1% of steps."""


COMPARED = {
    "model_type": "architecture",
    "hidden_size": "hidden size",
    "vocab_size": "vocabulary size",
    "num_hidden_layers": "number of layers",
}


def confidence_bin(confidence: float) -> int:
    """The bin of a head's confidence, from 0 to `len(CONFIDENCE_EDGES)`."""
    return bisect_right(CONFIDENCE_EDGES, confidence)


@dataclass(frozen=True)
class Acceptance:
    """Acceptance rates of Medusa heads by confidence and rank: the prior by which draft trees are built.

    Entry `[h][c][r]`: how often the token of rank r of head h was accepted after accepted ones, with confidence bin c.
    """

    table: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        for head, bins in enumerate(self.table):
            if len(bins) != len(CONFIDENCE_EDGES) + 1:
                raise ValueError(f"head {head} has {len(bins)} bins of confidence, not {len(CONFIDENCE_EDGES) + 1}")
            for ranks in bins:
                if not ranks or not all(0 <= later <= earlier <= 1 for earlier, later in pairwise((1.0, *ranks))):
                    raise ValueError(f"head {head}: acceptance must fall with the rank, from 1 to 0, got {ranks}")

    @classmethod
    def from_lists(cls, table: Sequence[Sequence[Sequence[float]]]) -> Acceptance:
        """From the lists of a JSON file."""
        try:
            return cls(tuple(tuple(tuple(map(float, ranks)) for ranks in bins) for bins in table))
        except TypeError:
            raise ValueError(f"acceptance must be lists [heads][bins][ranks] of numbers, got {table!r:.80}") from None

    @classmethod
    def untuned(cls, heads: int) -> Acceptance:
        """The assumption for heads that were not measured: rank 0 is accepted with the confidence as probability."""
        edges = (0.0, *CONFIDENCE_EDGES, 1.0)
        confidences = [(low + high) / 2 for low, high in pairwise(edges)]
        return cls(
            tuple(
                tuple(
                    tuple(0.8**head * min(c, c if rank == 0 else (1 - c) * 0.5**rank) for rank in range(RANKS))
                    for c in confidences
                )
                for head in range(heads)
            )
        )

    @property
    def heads(self) -> int:
        """Number of heads."""
        return len(self.table)

    def cut(self, ranks: int) -> Acceptance:
        """The same table, reduced to the first `ranks` ranks."""
        return Acceptance(tuple(tuple(row[:ranks] for row in bins) for bins in self.table))


def fingerprint(model: PreTrainedModel, tokenizer: Any = None) -> dict[str, Any]:
    """What is stored with heads to recognise their target."""
    matrix = output_matrix(model)
    return {
        "name_or_path": model.name_or_path,
        "model_type": model.config.get_text_config().model_type,
        "hidden_size": matrix.in_features,
        "vocab_size": matrix.out_features,
        "num_hidden_layers": len(decoder_layers(model)),
        "chat_template": chat_template_hash(tokenizer),
    }


def chat_template_hash(tokenizer: Any) -> str | None:
    """The first 16 hexadecimal digits of the SHA-256 of a tokenizer's chat template; None if it has none."""
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        return None
    text = template if isinstance(template, str) else json.dumps(template, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def other_chat_template(base: dict[str, Any] | None, tokenizer: Any) -> str | None:
    """A warning if the heads were trained with another chat template than this tokenizer's, else None."""
    trained = (base or {}).get("chat_template")
    if trained is None or trained == chat_template_hash(tokenizer):
        return None
    return "the heads were trained with another chat template than this tokenizer's: fewer draft tokens are accepted"


def check_heads(config: MedusaConfig, model: PreTrainedModel, what: str) -> None:
    """Raise unless heads fit `model`: their sizes, then the target they were trained for."""
    actual, trained_for = fingerprint(model), config.base or {}
    for base in ({"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}, trained_for):
        for field, name in COMPARED.items():
            expected = base.get(field)
            if expected and expected != actual[field]:
                origin = f" ({base['name_or_path']})" if base.get("name_or_path") else ""
                raise ValueError(
                    f"{what} was made for a target with {name} {expected}{origin}, but this target has "
                    f"{actual[field]}; load the heads that belong to it"
                )


class MedusaConfig(PreTrainedConfig):
    """Configuration of a set of Medusa heads, with their measured acceptance.

    Args:
        hidden_size: width of the target's hidden state.
        vocab_size: rows of the target's output matrix.
        num_heads: head h predicts the token h + 2 positions after the one whose hidden state it reads.
        num_layers: residual blocks in each head.
        own_outputs: whether each head has its own output matrix instead of the target's.
        reads_token: whether the embedding of the next token, which the target has chosen, is an input (as in Hydra).
        reads_path: whether head h also reads the embeddings of the h draft tokens after that one, and so drafts what
            follows a given path (Hydra); requires `reads_token`.
        draft_vocab_size: how many tokens, those of `token_map`, own output matrices score; 0: the whole vocabulary.
        logit_scale: factor on the heads' logits.
        lora_rank: rank of a PEFT adapter in the folder `lora`, on each head's copy of the output matrix; 0: none.
        base: the target that the heads were trained for, see `fingerprint`.
        acceptance: measured by `hf-specgen tune`, `[heads][bins][ranks]`; see `Acceptance`.
    """

    model_type = "medusa_heads"

    hidden_size: int = 0
    vocab_size: int = 0
    num_heads: int = 4
    num_layers: int = 1
    own_outputs: bool = False
    reads_token: bool = False
    reads_path: bool = False
    draft_vocab_size: int = 0
    logit_scale: float = 1.0
    lora_rank: int = 0
    base: dict[str, Any] | None = None
    acceptance: list[list[list[float]]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)
        for name in ("hidden_size", "vocab_size", "draft_vocab_size", "lora_rank", "num_heads", "num_layers"):
            value, least = getattr(self, name), 1 if name in ("num_heads", "num_layers") else 0
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r:.80}")
        for name in ("own_outputs", "reads_token", "reads_path"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, got {getattr(self, name)!r:.80}")
        if not isinstance(self.base, dict | None):
            raise ValueError(f"base must be an object, got {self.base!r:.80}")
        if self.reads_path and not self.reads_token:
            raise ValueError(
                "heads that read the path read its first token, too: reads_path=True needs reads_token=True"
            )
        if self.draft_vocab_size and not self.own_outputs:
            raise ValueError(f"draft_vocab_size={self.draft_vocab_size} needs output matrices of the heads' own")
        if self.own_outputs and self.lora_rank:
            raise ValueError(f"heads with their own output matrices take no LoRA, got lora_rank={self.lora_rank}")
        if self.acceptance is not None and Acceptance.from_lists(self.acceptance).heads != self.num_heads:
            raise ValueError(f"acceptance is given for {len(self.acceptance)} heads, but there are {self.num_heads}")

    def tokens_read(self, head: int) -> int:
        """How many tokens after its hidden state a head reads."""
        return head + 1 if self.reads_path else int(self.reads_token)


class ResidualBlock(nn.Module):
    """Layers of `x + SiLU(Linear(x))`; the identity if all weights are zero."""

    def __init__(self, hidden_size: int, num_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + nn.functional.silu(layer(x))
        return x


class MedusaHeads(PreTrainedModel):
    """A set of Medusa heads, saved and loaded like any Transformers model; new ones predict the target's next token."""

    config_class = MedusaConfig
    config: MedusaConfig
    base_model_prefix = ""

    def __init__(self, config: MedusaConfig):
        super().__init__(config)
        size, count = config.hidden_size, range(config.num_heads)
        self.blocks = nn.ModuleList(ResidualBlock(size, config.num_layers) for _ in count)
        if config.reads_token:
            read = [config.tokens_read(head) for head in count]
            self.token_maps = nn.ModuleList(nn.Linear(tokens * size, size, bias=False) for tokens in read)
        if config.own_outputs:
            rows = config.draft_vocab_size or config.vocab_size
            self.lm_heads = nn.ModuleList(nn.Linear(size, rows, bias=False) for _ in count)
        if config.draft_vocab_size:
            self.register_buffer("token_map", torch.arange(config.draft_vocab_size))
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise with zeros; `from_target` copies the output matrices."""
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    @classmethod
    def from_target(cls, target: PreTrainedModel, tokenizer: Any = None, **shape: Any) -> MedusaHeads:
        """New heads for a target, in float32 on its device; `shape` are fields of `MedusaConfig`."""
        matrix = output_matrix(target)
        sizes: dict[str, Any] = {"hidden_size": matrix.in_features, "vocab_size": matrix.out_features}
        heads = cls(MedusaConfig(**sizes, base=fingerprint(target, tokenizer), **shape))
        if heads.config.own_outputs:
            if matrix.bias is not None:
                raise ValueError(
                    "the target's output matrix has a bias, which the heads' own matrices cannot copy; "
                    "use own_outputs=False"
                )
            for head in heads.lm_heads:
                cast(nn.Linear, head).weight.data.copy_(matrix.weight)
        return cast(MedusaHeads, cast(Any, heads).to(matrix.weight.device))

    def forward(self, hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., heads, hidden]`: the hidden state of each head, the input of its output matrix.

        Args:
            hidden: `[..., hidden]` the input of the target's output matrix when it predicted the next token.
            tokens: `[..., tokens, hidden]` embeddings of that token and those after it, for heads that read tokens.
        """
        return torch.stack([self.head_state(head, hidden, tokens) for head in range(self.config.num_heads)], dim=-2)

    def head_state(self, head: int, hidden: torch.Tensor, tokens: torch.Tensor | None = None) -> torch.Tensor:
        """`[..., hidden]`, the hidden state of one head."""
        if read := self.config.tokens_read(head):
            if tokens is None or tokens.shape[-2] < read:
                raise ValueError(
                    f"head {head} reads {read} tokens after the hidden state; pass their embeddings as tokens"
                )
            hidden = hidden + self.token_maps[head](tokens[..., :read, :].flatten(-2))
        return cast(torch.Tensor, self.blocks[head](hidden))


AutoConfig.register(MedusaConfig.model_type, MedusaConfig, exist_ok=True)
AutoModel.register(MedusaConfig, MedusaHeads, exist_ok=True)


class MedusaRunner(nn.Module):
    """A set of heads attached to its target."""

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, lora: Any = None):
        super().__init__()
        self.heads, self._target = heads, target
        self._embeddings = cast(Any, target.get_input_embeddings()) if heads.config.reads_token else None
        matrix = output_matrix(target).weight
        self._device, self._dtype = matrix.device, matrix.dtype
        self._deltas = None if lora is None else tuple(delta.to(matrix) for delta in stacked_deltas(lora))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The logits of all heads, `[rows, heads, vocab]`, scaled and capped like the target's own."""
        states = self.heads(hidden.to(self._device, self._dtype), self._embedded(tokens))  # [rows, heads, hidden]
        return output_logits(self._target, states, self._outputs)

    @torch.no_grad()
    def forward(self, head: int, hidden: torch.Tensor, paths: torch.Tensor) -> torch.Tensor:
        """The logits of one head after each path, `[rows, nodes, vocab]`.

        Args:
            hidden: `[rows, hidden]` as for `logits`.
            paths: `[rows, nodes, tokens]` the tokens from each row's last one to each node.
        """
        hidden = hidden.to(self._device, self._dtype)[:, None].expand(-1, paths.shape[1], -1).flatten(0, 1)
        state = self.heads.head_state(head, hidden, self._embedded(paths.flatten(0, 1)))[:, None]
        logits = output_logits(self._target, state, lambda states: self._outputs(states, slice(head, head + 1)))
        return logits.view(*paths.shape[:2], -1)

    def _embedded(self, tokens: torch.Tensor) -> torch.Tensor | None:
        if self._embeddings is None:
            return None
        embedded: torch.Tensor = self._embeddings(tokens.to(self._embeddings.weight.device))
        return embedded.to(self._device, self._dtype)

    def _outputs(self, states: torch.Tensor, heads: slice = slice(None)) -> torch.Tensor:
        """`[rows, heads, hidden]` states of some heads to `[rows, heads, vocab]`; one product for a shared matrix."""
        if self.heads.config.own_outputs:
            matrices, config = self.heads.lm_heads[heads], self.heads.config
            logits = torch.stack([matrix(states[:, place]) for place, matrix in enumerate(matrices)], dim=1)
            logits = logits * config.logit_scale
            if not config.draft_vocab_size:
                return logits
            whole = logits.new_full((*logits.shape[:-1], config.vocab_size), -torch.inf)
            return whole.index_copy_(-1, cast(torch.Tensor, self.heads.token_map), logits)
        shared: torch.Tensor = output_matrix(self._target)(states)
        if self._deltas is None:
            return shared
        down, up = (part[heads] for part in self._deltas)  # [heads, hidden, rank], [heads, rank, vocab]
        return shared + (states.transpose(0, 1) @ down @ up).transpose(0, 1)
