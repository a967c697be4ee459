"""Masks as 0/1 matrices for small cases, and against the slow reference for random ones."""

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, MistralConfig

from hf_specgen import DraftTree, compat
from hf_specgen.device_tree import Ancestors, Frontier
from hf_specgen.targets.attention import without_cudnn_attention
from hf_specgen.targets.inputs import PreparedCall
from hf_specgen.targets.masks import StepLayout, StepMasks, additive, chunked_mask, full_mask, sliding_mask
from hf_specgen.targets.target import Target
from tests.helpers import reference, tiny_model


def layout(lengths: Sequence[int], parents: Sequence[Sequence[int]], padding_mask: Any = None) -> StepLayout:
    """A step of rows with equally many nodes."""
    return StepLayout.after(
        lengths,
        depths=torch.tensor([[reference.depth(row, node) for node in range(-1, len(row))] for row in parents]),
        ancestors=torch.tensor([reference.ancestor_matrix(row) for row in parents], dtype=torch.bool),
        padding_mask=None if padding_mask is None else torch.tensor(padding_mask, dtype=torch.bool),
    )


@st.composite
def any_step(draw: st.DrawFn) -> tuple[list[int], list[tuple[int, ...]], list[list[bool]] | None]:
    """Lengths, parents, and padding (left, never the whole prompt) of a batch."""
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(1, 9), min_size=batch, max_size=batch))
    parents = [draw(reference.any_parents(st.just(nodes))) for _ in range(batch)]
    prompt = draw(st.integers(1, min(lengths)))
    paddings = [draw(st.integers(0, prompt - 1)) for _ in range(batch)]
    padding_mask = [[slot >= padding for slot in range(prompt)] for padding in paddings]
    return lengths, parents, draw(st.sampled_from([None, padding_mask]))


@pytest.mark.parametrize("kind", ["full", "window", "chunk"])
@given(step=any_step(), size=st.integers(1, 8))
def test_masks_agree_with_the_reference(kind: str, step: tuple, size: int) -> None:
    """Would catch: a query that sees a sibling, padding, or a slot outside of its window."""
    lengths, parents, padding_mask = step
    fast = layout(lengths, parents, padding_mask)
    mask = {"full": full_mask, "window": sliding_mask, "chunk": chunked_mask}[kind]
    limits = {} if kind == "full" else {kind: size}
    slow = [
        reference.row_mask(length, tree, fast.num_slots, padding_mask and padding_mask[row], **limits)
        for row, (length, tree) in enumerate(zip(lengths, parents, strict=True))
    ]
    assert mask(fast, *limits.values())[:, 0].int().tolist() == slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_additive_mask_has_finite_softmax_in_every_dtype(dtype: torch.dtype) -> None:
    """Would catch: a bool given to eager attention (which adds it), or -inf, whose softmax is nan in an empty line."""
    mask = torch.tensor([[True, False], [False, False]])
    numbers = additive(mask, dtype)
    assert numbers.dtype == dtype
    assert numbers.tolist() == [[0, torch.finfo(dtype).min], [torch.finfo(dtype).min] * 2]
    assert bool(numbers.softmax(dim=-1).isfinite().all())
    assert mask.tolist() == [[True, False], [False, False]]


def test_eager_attention_gets_a_mask_in_plain_steps_too() -> None:
    """Would catch: None, which attention written by hand adds to its scores."""
    model = tiny_model("gemma2")
    assert compat.attention_implementation(model.config) == "eager"
    made = StepMasks(model, None).of_step(DraftTree.empty(2), (5, 5), 0, 0)
    for kind in ("full_attention", "sliding_attention"):
        assert made[kind].shape[:2] == (2, 1)


CHAINS = {"equal": ([7, 7], 0), "different": ([9, 2, 40], 0), "padded": ([6, 6], 2), "one": ([1], 0)}


@pytest.mark.parametrize("queries", [1, 2, 5])
@pytest.mark.parametrize("rows", CHAINS)
@pytest.mark.parametrize("window", [None, 3])
def test_masks_of_chains_equal_the_reference(window: int | None, rows: str, queries: int) -> None:
    """Would catch: one token too many or too few; no mask for a row with padding, or behind a window."""
    lengths, padding = CHAINS[rows]
    model = SimpleNamespace(config=LlamaConfig(sliding_window=window), dtype=torch.float32)
    model.config._attn_implementation = "sdpa"
    model.get_input_embeddings = lambda: torch.nn.Embedding(2, 2)
    padding_mask = None if not padding else torch.tensor([[slot >= padding for slot in range(6)], [True] * 6])
    tree = DraftTree.chains([[0] * (queries - 1)] * len(lengths))
    made = StepMasks(cast(Any, model), padding_mask).of_step(tree, tuple(lengths), 0, 0)
    chain, width = tuple(range(-1, queries - 2)), max(lengths) + queries
    expected = [
        reference.row_mask(length, chain, width, None if padding_mask is None else padding_mask[row].tolist(), window)
        for row, length in enumerate(lengths)
    ]
    if made is None:
        made = torch.ones(1, 1, 1, width, dtype=torch.bool)
    assert made.expand(len(lengths), -1, -1, -1)[:, 0].int().tolist() == expected


# A drafter's tree pass: reading a tree level by level equals reading each of its paths alone

SHAPE = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64}
SHAPE |= {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
TREES = [
    ([5, 6, 7, 8, 9, 10], (-1, -1, 0, 1, 2, 3)),  # two levels of two nodes, then one more below each
    ([11, 12, 13, 14, 15, 16], (-1, -1, 0, 0, 3, 2)),
]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE) if request.param == "llama" else MistralConfig(**SHAPE, sliding_window=4)
    return AutoModelForCausalLM.from_config(config).eval()


def prefilled(model: torch.nn.Module) -> tuple[Target, torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    kwargs = {"attention_mask": mask, "position_ids": positions, "use_cache": True}
    target = Target(PreparedCall(model, ids, GenerationConfig(), kwargs))
    target.prefill()
    return target, ids, mask


@torch.no_grad()
def path_logits(model: torch.nn.Module, text: torch.Tensor, tokens: list[int], parents: tuple[int, ...], node: int):
    """Slow reference: the logits after a node, from a forward pass over its path without any cache."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return model(torch.cat([text, torch.tensor(path)])[None]).logits[0, -1]


def frontiers(width: int) -> Iterator[Frontier]:
    """The three levels of `TREES`, or of the chains of their first nodes, as `TreeBuilder` expands them."""
    device = torch.device("cpu")
    ancestors = Ancestors(2, 1, device)
    depths = [0]
    for level in range(3):
        nodes = range(2 * level, 2 * level + width)
        tokens = torch.tensor([[tree_tokens[node] for node in nodes] for tree_tokens, _ in TREES])
        parent_index = None
        if width > 1 and level:
            parent_index = torch.tensor([[parents[node] - 2 * (level - 1) for node in nodes] for _, parents in TREES])
        depths += [1 + level] * width
        ancestors = Ancestors(2, width, device, ancestors, parent_index)
        of_nodes = torch.tensor(depths) if width > 1 else None
        yield Frontier(tokens, 1 + level, len(depths) - 1, width == 1, ancestors, of_nodes, parent_index)


@torch.no_grad()
@pytest.mark.parametrize("width", [1, 2])
def test_grow_level_by_level_equals_each_path_alone(model: torch.nn.Module, width: int) -> None:
    """Would catch: nodes at wrong positions, a mask that shows siblings, a level written over another one."""
    target, ids, mask = prefilled(model)
    for level, frontier in enumerate(frontiers(width)):
        logits = target.extend_tree(frontier)
        for row, (tokens, parents) in enumerate(TREES):
            text = ids[row][mask[row].bool()]
            for column in range(width):
                if width == 1:
                    chain = tokens[: 2 * level + 1 : 2]
                    expected = path_logits(model, text, chain, tuple(range(-1, level)), level)
                else:
                    expected = path_logits(model, text, tokens, parents, 2 * level + column)
                torch.testing.assert_close(logits[row, column], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_grow_then_commit_keeps_a_path_per_row(model: torch.nn.Module) -> None:
    """Would catch: rejected nodes left in the cache, or accepted nodes computed again."""
    target, ids, mask = prefilled(model)
    for frontier in frontiers(2):
        target.extend_tree(frontier)
    paths = [[1, 3], [0]]
    target.commit(paths)
    logits = target.forward(DraftTree.empty(2), [20, 21])[:, -1]
    for row, path in enumerate(paths):
        text = [*ids[row][mask[row].bool()].tolist(), *(TREES[row][0][node] for node in path), 20 + row]
        torch.testing.assert_close(logits[row], model(torch.tensor([text])).logits[0, -1], atol=1e-5, rtol=1e-4)


# Tests that cuDNN's attention is off in passes on a GPU, and on again afterwards

kernels, GPU = torch.backends.cuda, torch.device("cuda")


@pytest.fixture(autouse=True)
def kernels_restored() -> Iterator[None]:
    """PyTorch's settings are restored."""
    before = kernels.cudnn_sdp_enabled(), kernels.mem_efficient_sdp_enabled(), kernels.math_sdp_enabled()
    kernels.enable_cudnn_sdp(True)
    yield
    kernels.enable_cudnn_sdp(before[0])
    kernels.enable_mem_efficient_sdp(before[1])
    kernels.enable_math_sdp(before[2])


def test_it_is_off_inside_and_on_again_after_an_exception() -> None:
    """Would catch: a setting of the process that stays changed after an exception."""
    with pytest.raises(KeyError), without_cudnn_attention(GPU):
        assert not kernels.cudnn_sdp_enabled()
        raise KeyError
    assert kernels.cudnn_sdp_enabled()


def test_it_stays_on_where_no_other_kernel_may_be_used() -> None:
    """Would catch: attention without any kernel, an error of PyTorch."""
    kernels.enable_mem_efficient_sdp(False)
    kernels.enable_math_sdp(False)
    with without_cudnn_attention(GPU):
        assert kernels.cudnn_sdp_enabled()


def test_overlapping_passes_of_two_threads_restore_it_when_the_last_one_ends() -> None:
    """Would catch: cuDNN turned on again under a pass of another thread."""
    entered, leave = threading.Event(), threading.Event()

    def call() -> None:
        with without_cudnn_attention(GPU):
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=call)
    with without_cudnn_attention(GPU):
        thread.start()
        assert entered.wait(10)
    assert not kernels.cudnn_sdp_enabled()
    leave.set()
    thread.join()
    assert kernels.cudnn_sdp_enabled()
