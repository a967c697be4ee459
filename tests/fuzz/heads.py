"""Random draft heads for any target, and sessions whose scores are raised for the tokens that will be generated."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from hf_specgen import DFlashCandidates, EagleCandidates, GemmaAssistantCandidates, MTPCandidates, PEagleCandidates
from hf_specgen.candidates.recycling import RecyclingTable
from hf_specgen.drafter import DepthLogits
from hf_specgen.heads import MedusaHeads
from hf_specgen.heads.base import DraftHead
from hf_specgen.heads.block import BlockAttention, BlockConfig, BlockHead
from hf_specgen.heads.dflash2 import DFlash2Config, DFlash2Head
from hf_specgen.heads.dspark import DominoConfig, DominoHead, DSparkConfig, DSparkHead
from hf_specgen.heads.eagle import Eagle1Head, Eagle3Head, EagleConfig
from hf_specgen.heads.layers import LayerConfig
from hf_specgen.heads.lilicorr import LiLiCorrConfig, LiLiCorrHead
from hf_specgen.targets.model_parts import decoder_layers, output_matrix
from hf_specgen.verification.result import TopTokens
from tests.fuzz.cases import Case
from tests.fuzz.models import ASSISTANT, FIXTURES, FOLDERS
from tests.fuzz.scripted import spoil_scores
from tests.fuzz.situations import SCORE_FAULTS
from tests.helpers.lora import write_lora
from tests.helpers.models import recorded_inputs

CLASSES: dict[str, Any] = {
    "eagle1": EagleCandidates,
    "eagle3": EagleCandidates,
    "dflash": DFlashCandidates,
    "peagle": PEagleCandidates,
    "mtp": MTPCandidates,
    "assistant": GemmaAssistantCandidates,
}
BLOCK_SIZE = 5
OF_RNN: dict[str, Any] = {"markov_rank": 4, "markov_head_type": "rnn", "layout_undecided": True}
OF_DFLASH2: dict[str, Any] = {"conv_group_size": 4, "selector_rank": 4, "selector_top_k": 9, "own_lm_head": True}
OF_DOMINO: dict[str, Any] = {"emb_dim": 4, "gru_hidden_dim": 6, "max_draft_tokens": BLOCK_SIZE - 1}
OF_LILICORR: dict[str, Any] = {"candidate_topk": 4, "lattice_size": 8, "num_layers": 1, "num_heads": 2, "factor_dim": 4}
OF_LILICORR |= {"mlp_ratio": 2.0, "vector_eps": 1e-6, "logit_scale": 9.0, "first_proposing_position": 1}
LATENT = {"kv_lora_rank": 12, "q_lora_rank": 10, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}
"""Options of layers with multi-head latent attention."""
BLOCK_HEADS: dict[str, Callable[[dict[str, Any]], BlockHead]] = {
    "DFlash": lambda sizes: BlockHead(BlockConfig(**sizes)),
    "DSpark": lambda sizes: DSparkHead(DSparkConfig(markov_rank=4, **sizes)),
    "DSpark, rnn": lambda sizes: DSparkHead(DSparkConfig(**OF_RNN, **sizes)),
    "DFlash2": lambda sizes: DFlash2Head(
        DFlash2Config(**sizes | OF_DFLASH2 | {"draft_vocab_size": sizes["vocab_size"]})
    ),
    "Domino": lambda sizes: DominoHead(DominoConfig(**OF_DOMINO, **sizes)),
    "LiLiCorr": lambda sizes: LiLiCorrHead(LiLiCorrConfig(**sizes | OF_LILICORR)),
}
"""The variants of block heads, with the fields that they have in common."""
MASK_TOKEN = 3

RAISED = 50.0
"""Added to the score of a token that a head is to propose."""


def head_candidates(case: Case, name: str, model: Any, answers: list[list[int]], settings: dict[str, Any]) -> Any:
    """A strategy with a head that proposes the answers of each row, in a fraction of the places."""

    fault = case.drafter_fault if case.drafter_fault in SCORE_FAULTS else ""

    class Steered(CLASSES[name]):  # type: ignore[misc]
        def begin(self, *arguments: Any) -> Any:
            texts = [_places(text, case.accuracy, case.seed) for text in answers]
            return steer(super().begin(*arguments), texts, fault)

    with torch.random.fork_rng():
        torch.manual_seed(case.seed)
        source: Any = {"mtp": FIXTURES.get(case.architecture), "assistant": ASSISTANT}.get(name)
        return Steered(source or random_head(name, model, Random(case.seed)).to(model.device), **settings)


def _places(text: list[int], accuracy: float, seed: int) -> list[int | None]:
    random = Random(seed)
    return [token if random.random() < accuracy else None for token in text]


def steer(session: Any, texts: Sequence[Sequence[int | None]], fault: str = "") -> Any:
    """Let the drafter of a session prefer the tokens that will be generated, by row, where they are not None.

    With a fault its scores are not finite, see `spoil_scores`.
    """
    drafter = session.drafter

    def known_tokens(depths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Row, index in `depths`, and token of what is known of the texts at these depths."""
        for row, generated in enumerate(session.batch.state.generated):
            for index, depth in enumerate(depths):
                known = texts[row][len(generated) + depth :]
                if known and known[0] is not None:
                    yield row, index, known[0]

    def raised(logits: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        ids = drafter.token_ids
        by_place = logits if logits.dim() == 3 else logits[:, None]
        for row, place, token in known_tokens(depths):
            by_place[row, place, token if ids is None else ids == token] += RAISED
        spoil_scores(fault, logits)
        return logits

    def raised_depths(predicted: DepthLogits, depth: int) -> DepthLogits:
        logits, candidates = predicted
        for row, place, token in known_tokens(range(depth)):
            index = token
            if candidates is not None:  # the first candidate, after which the next depth can go on
                at_depth, index = candidates[row, place], 0
                at_depth[at_depth == token] = at_depth[0].clone()
                at_depth[0] = token
            logits[row, place, :, index] += RAISED
        spoil_scores(fault, logits)
        return predicted

    replaced: dict[str, Any] = {"capturable_passes": lambda *_: None}  # captured functions would not be steered
    forward_text = drafter.forward_text
    forward_nodes = drafter.forward_nodes
    forward_depths = drafter.forward_depths
    replaced["forward_text"] = lambda text: raised(forward_text(text), [0])
    replaced["forward_nodes"] = lambda frontier: raised(
        forward_nodes(frontier), [frontier.depth] * frontier.tokens.shape[1]
    )
    replaced["forward_depths"] = lambda text, depth: raised_depths(forward_depths(text, depth), depth)
    vars(drafter).update(replaced)
    return session


def random_head(name: str, model: Any, random: Random) -> DraftHead:
    """A head with random weights and options that fits the target."""
    config, embedding = model.config.get_text_config(), model.get_input_embeddings().weight
    width, layers = config.hidden_size, config.num_hidden_layers
    options = {"num_key_value_heads": random.choice((1, 2, 4)), "qk_norm": random.random() < 0.5}
    options |= LATENT if random.random() < 0.2 else {}
    layer = LayerConfig(hidden_size=width, intermediate_size=48, num_attention_heads=4, head_dim=16, **options)
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


# Heads that know a text: fitted to what plain `generate` wrote, so that their drafts are often accepted

PATH_WEIGHT = 0.01
"""Size of the weights with which heads read the path before their token: enough to change a draft."""


def medusa_heads(
    model: Any, ids: torch.Tensor, mask: torch.Tensor, num_heads: int = 3, reads_path: bool = False, start: int = 0
) -> MedusaHeads:
    """Medusa heads: ridge regression from the states behind `start` to the tokens h + 2 places on."""
    matrix = output_matrix(model)
    states = inputs_of(matrix, model, ids, mask)
    heads = MedusaHeads.from_target(model, num_heads=num_heads, own_outputs=True, reads_path=reads_path)
    for token_map in heads.token_maps if reads_path else ():
        generator = torch.Generator(matrix.weight.device).manual_seed(0)
        nn.init.normal_(token_map.weight, std=PATH_WEIGHT, generator=generator)
    for head in range(num_heads):
        distance = head + 2
        weight = _ridge(states[:, start:-distance], ids[:, start + distance :], matrix.weight.shape[0])
        heads.lm_heads[head].weight.data = weight.to(matrix.weight)
    return heads.eval()


def exit_adapter(model: Any, exit_layer: int, ids: torch.Tensor, mask: torch.Tensor) -> nn.Module | None:
    """A linear layer that reads the next token of a text from the state after its first layers, if that is a vector.

    None also for a model without this layer, which is refused.
    """
    layers = decoder_layers(model)
    if exit_layer >= len(layers):
        return None
    states = inputs_of(layers[exit_layer], model, ids, mask)
    if states.dim() != 3:
        return None
    weight = _ridge(states[:, :-1], ids[:, 1:], output_matrix(model).weight.shape[0]).to(states)
    adapter = nn.Linear(*weight.T.shape, bias=False)
    adapter.weight.data = weight
    return adapter.eval()


def adapter_of(model: Any) -> Path:
    """A folder with a LoRA adapter of random weights that changes all linear layers of the decoder's layers."""
    names = {
        name.rpartition(".")[2]
        for layer in decoder_layers(model)
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    folder = Path(tempfile.mkdtemp(dir=FOLDERS.name))
    return write_lora(model, folder, tuple(sorted(names)) or ("none",))


def recycling_table(model: Any, ids: torch.Tensor) -> RecyclingTable:
    """A table in which the most likely token after each token of a text is the next one of the text."""
    vocab_size = output_matrix(model).weight.shape[0]
    table = RecyclingTable(vocab_size)
    before, after = (part.flatten().cpu().numpy() for part in (ids[:, :-1], ids[:, 1:]))
    candidates = np.stack([after, (after + 1) % vocab_size], axis=1)
    table.update(TopTokens(before, candidates, np.tile([0.6, 0.2], (len(after), 1))))
    return table


def inputs_of(module: nn.Module, model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`[batch, length, hidden]` what a module reads while the model reads a text."""
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with torch.no_grad(), recorded_inputs(module, torch.clone) as read:
        model(input_ids=ids, attention_mask=mask, position_ids=positions)
    return read[0]


def _ridge(states: torch.Tensor, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    x = states.flatten(0, 1).double()
    y = nn.functional.one_hot(tokens.flatten(), vocab).double()
    solution = torch.linalg.solve(x.T @ x + 1e-3 * torch.eye(x.shape[1], dtype=x.dtype, device=x.device), x.T @ y)
    return 20 * solution.T
