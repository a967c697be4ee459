"""A drafter's tree pass: reading a tree level by level equals reading each of its paths alone."""

import threading
from collections.abc import Iterator

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, MistralConfig

from hf_specgen.targets.attention import without_cudnn_attention
from hf_specgen.targets.target import Target
from hf_specgen.tree import DraftTree

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
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
    target = Target(model, ids, GenerationConfig(), kwargs)
    target.prefill(DraftTree.empty(2))
    return target, ids, mask


@torch.no_grad()
def path_logits(model: torch.nn.Module, text: torch.Tensor, tokens: list[int], parents: tuple[int, ...], node: int):
    """Slow reference: the logits after a node, from a forward pass over its path without any cache."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, tokens[node])
        node = parents[node]
    return model(torch.cat([text, torch.tensor(path)])[None]).logits[0, -1]


@torch.no_grad()
@pytest.mark.parametrize("levels", [(2, 2, 2), (1, 1, 1, 1, 1, 1), (2, 4)])
def test_grow_level_by_level_equals_each_path_alone(model: torch.nn.Module, levels: tuple[int, ...]) -> None:
    """Would catch: nodes at wrong positions, a mask that shows siblings, a level written over another one."""
    target, ids, mask = prefilled(model)
    read = 0
    for count in levels:
        read += count
        tree = DraftTree.from_nodes([(tokens[:read], parents[:read]) for tokens, parents in TREES])
        logits = target.grow(tree, count)
        for row, (tokens, parents) in enumerate(TREES):
            text = ids[row][mask[row].bool()]
            for place, node in enumerate(range(read - count, read)):
                expected = path_logits(model, text, tokens, parents, node)
                torch.testing.assert_close(logits[row, place], expected, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_grow_then_commit_keeps_a_path_per_row(model: torch.nn.Module) -> None:
    """Would catch: rejected nodes left in the cache, or accepted nodes computed again."""
    target, ids, mask = prefilled(model)
    target.grow(DraftTree.from_nodes([(tokens, parents) for tokens, parents in TREES]), 6)
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
    with pytest.raises(KeyError), without_cudnn_attention(GPU):
        assert not kernels.cudnn_sdp_enabled()
        raise KeyError
    assert kernels.cudnn_sdp_enabled()


def test_it_stays_on_where_no_other_kernel_may_be_used() -> None:
    kernels.enable_mem_efficient_sdp(False)
    kernels.enable_math_sdp(False)
    with without_cudnn_attention(GPU):
        assert kernels.cudnn_sdp_enabled()


def test_overlapping_passes_of_two_threads_restore_it_when_the_last_one_ends() -> None:
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
