"""Random draft heads for any target, and sessions whose scores are raised for the tokens that will be generated."""

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch

from hf_specgen import (
    Call,
    DFlashCandidates,
    EagleCandidates,
    GemmaAssistantCandidates,
    MTPCandidates,
    PEagleCandidates,
)
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead
from hf_specgen.heads.dflash2 import DFlash2Config, DFlash2Head
from hf_specgen.heads.domino import DominoConfig, DominoHead
from hf_specgen.heads.dspark import DSparkConfig, DSparkHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, EagleConfig
from hf_specgen.heads.layers import LayerConfig
from tests.fuzz.models import ASSISTANT, FIXTURES

CLASSES: dict[str, Any] = {
    "eagle1": EagleCandidates,
    "eagle3": EagleCandidates,
    "dflash": DFlashCandidates,
    "peagle": PEagleCandidates,
    "mtp": MTPCandidates,
    "assistant": GemmaAssistantCandidates,
}
BLOCK_SIZE = 5
BLOCK_HEADS: dict[str, Callable[[dict[str, Any]], BlockHead]] = {
    "DFlash": lambda sizes: BlockHead(BlockConfig(**sizes)),
    "DSpark": lambda sizes: DSparkHead(DSparkConfig(markov_rank=4, **sizes)),
    "DSpark, rnn": lambda sizes: DSparkHead(
        DSparkConfig(markov_rank=4, markov_head_type="rnn", measures_layout=True, **sizes)
    ),
    "DFlash2": lambda sizes: DFlash2Head(
        DFlash2Config(
            conv_group_size=4,
            selector_rank=4,
            selector_top_k=9,
            **sizes | {"draft_vocab_size": sizes["vocab_size"], "own_lm_head": True},
        )
    ),
    "Domino": lambda sizes: DominoHead(
        DominoConfig(emb_dim=4, gru_hidden_dim=6, max_draft_tokens=BLOCK_SIZE - 1, **sizes)
    ),
}
"""The variants of block heads, with the fields that they have in common."""
MASK_TOKEN = 3

RAISED = 50.0
"""Added to the score of a token that a head is to propose."""


def head_candidates(
    name: str, architecture: str, model: Any, answers: list[list[int]], accuracy: float, seed: int, settings: Any
) -> Any:
    """A strategy with a head that proposes the answers of each row, in a fraction `accuracy` of the places."""

    class Steered(CLASSES[name]):  # type: ignore[misc]
        def begin(self, call: Call, *arguments: Any) -> Any:
            return steer(super().begin(call, *arguments), [_places(text, accuracy, seed) for text in answers])

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        source: Any = {"mtp": FIXTURES.get(architecture), "assistant": ASSISTANT}.get(name)
        return Steered(source or random_head(name, model, Random(seed)).to(model.device), **settings)


def _places(text: list[int], accuracy: float, seed: int) -> list[int | None]:
    random = Random(seed)
    return [token if random.random() < accuracy else None for token in text]


def steer(session: Any, texts: Sequence[Sequence[int | None]]) -> Any:
    """Let the session of a head prefer certain tokens; everything that the head does is done.

    Args:
        session: drafts token by token or all depths at once.
        texts: by row the tokens that will be generated; None where the head chooses.
    """

    def raised(compute: Callable[..., torch.Tensor], depths: Callable[..., Sequence[int]]) -> Any:
        def scores_of(*arguments: Any) -> torch.Tensor:
            scores = compute(*arguments)
            by_place = scores if scores.dim() == 3 else scores[:, None]
            for row, generated in enumerate(session.call.state.generated):
                for place, depth in enumerate(depths(row, *arguments)):
                    known = texts[row][len(generated) + depth :]
                    if known and known[0] is not None:
                        by_place[row, place, known[0]] += RAISED
            return scores

        return scores_of

    if hasattr(session, "depth_logits"):
        vars(session)["depth_logits"] = raised(session.depth_logits, lambda row, depth: range(depth))
    else:
        vars(session)["first_scores"] = raised(session.first_scores, lambda row: [0])
        vars(session)["next_scores"] = raised(
            session.next_scores, lambda row, tree: [tree.level] * tree.tokens.shape[1]
        )
    return session


def random_head(name: str, model: Any, random: Random) -> DraftHead:
    """A head with random weights and options that fits the target."""
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    width, layers = config.hidden_size, config.num_hidden_layers
    layer = LayerConfig(
        hidden_size=width,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=random.choice((1, 2, 4)),
        head_dim=16,
        qk_norm=random.random() < 0.5,
    )
    aux_layers = {"eagle1": (layers,), "dflash": (1, layers)}.get(name, (0, 1, layers))
    reduced = random.random() < 0.3  # not all of the target's tokens can be proposed
    sizes: dict[str, Any] = {
        "hidden_size": width,
        "vocab_size": len(embedding),
        "draft_vocab_size": len(embedding) - (20 if reduced else 0),
        "target_hidden_size": width,
        "num_aux_hidden_states": len(aux_layers),
        "aux_hidden_state_layers": aux_layers,
        "own_embeddings": embedding.shape[1] != width or random.random() < 0.3,
        "own_lm_head": True,
    }
    if name == "dflash":
        attention = [
            BlockAttention(),
            BlockAttention(causal=True),
            BlockAttention(window=4),
            BlockAttention(causal=True, window=6, window_from_anchor=True),
        ]
        block: dict[str, Any] = {
            "layer": layer,
            "attention": tuple(random.choices(attention, k=2)),
            "block_size": BLOCK_SIZE,
            "mask_token_id": MASK_TOKEN,
            "first_proposing_position": random.choice((0, 1)),
        }
        return random.choice(list(BLOCK_HEADS.values()))(block | sizes)
    options = {"num_layers": random.choice((1, 2))}
    if name == "eagle1":
        return Eagle1Head(EagleConfig(layer=layer, **options, **sizes))
    flags = {flag: random.random() < 0.5 for flag in ("norm_before_residual", "fc_norm", "norm_output")}
    mask = MASK_TOKEN if name == "peagle" else None
    return Eagle3Head(EagleConfig(layer=layer, mask_token_id=mask, **options, **flags, **sizes))
