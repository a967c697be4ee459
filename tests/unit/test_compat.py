"""Every private Transformers symbol that the package uses exists in this version, and is used in two files only."""

import ast
import inspect
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PrefixConstrainedLogitsProcessor,
    PreTrainedModel,
)
from transformers.cache_utils import Fp8QuantizedLayer, QuantizedLayer
from transformers.generation import utils as generation_utils
from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.requests import RequestState
from transformers.generation.continuous_batching.scheduler import Scheduler

import hf_specgen
from hf_specgen import compat
from hf_specgen.batching import transformers_batching
from hf_specgen.compat import CACHE
from tests.helpers import prompts, tiny_model
from tests.helpers.models import PROMPT_LENGTH

PACKAGE = Path(hf_specgen.__file__).parent
FILES = {PACKAGE / "compat.py", PACKAGE / "batching" / "transformers_batching.py"}
"""Those that may use private symbols: the second one those of continuous batching."""
METHODS = [
    (GenerationMixin, "_prefill", "self input_ids generation_config model_kwargs"),
    (GenerationMixin, "_sample", "self input_ids logits_processor stopping_criteria generation_config model_kwargs"),
    (GenerationMixin, "_supports_logits_to_keep", "self"),
    (GenerationMixin, "_update_model_kwargs_for_generation", "self outputs model_kwargs"),
    (GenerationMixin, "_optimize_model_for_decode", "self"),
    (GenerationMixin, "_get_logits_processor", "self generation_config"),
    (ContinuousBatchingManager, "_create_batch_processor", "self"),
    (Scheduler, "add_waiting_request", "self state"),
    (Scheduler, "schedule_batch", "self token_budget cache_budget"),
    (ContinuousBatchingIOs, "prepare_batch_update", "self"),
    (ModelRunner, "compute_batch", "self model batch_data"),
    (ModelRunner, "_sample", "self scores output_ids"),
    (GenerationConfig, "_get_default_generation_params", ""),
    (QuantizedLayer, "_quantize", "self tensor axis"),
    (Fp8QuantizedLayer, "_quantize", "self tensor"),
    (Fp8QuantizedLayer, "_dequantize", "self qtensor"),
]
SET_BY_GENERATE = {
    "GenerationConfig._pad_token_tensor": lambda seen: int(seen["generation_config"]._pad_token_tensor) == 0,
    "GenerationConfig._mask_length": lambda seen: seen["generation_config"]._mask_length == PROMPT_LENGTH,
    "Cache._is_user_defined": lambda seen: seen[CACHE]._is_user_defined is True,
}
PRIVATE = {
    *(name for _, name, _ in METHODS if name.startswith("_")),
    *(symbol.split(".")[1] for symbol in SET_BY_GENERATE),
    *("_attn_implementation", "_bulk_input_tensor", "_cached_continuous_batching_manager"),
    *("_device_mesh", "_eos_token_ids"),
    *("_get_torch_distributed_world_size", "_is_stateful", "_kv_token_views", "_true_initial_tokens"),
    *("_prefix_allowed_tokens_fn", "_quantized_keys", "_quantized_values"),
}
"""Of Transformers."""
OF_OTHER_LIBRARIES = {
    *("_compiled_call_impl", "_getframe", "_hf_hook", "_orig_mod", "_torchdynamo_orig_callable"),
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
}
"""Of Python, PyTorch and accelerate."""


def missing(symbol: str) -> str:
    """The message of a failed check."""
    return f"{symbol} is not what hf_specgen expects in Transformers {transformers.__version__}"


@pytest.mark.parametrize(("owner", "name", "expected"), METHODS)
def test_private_method_exists_with_its_parameters(owner: Any, name: str, expected: str) -> None:
    """Would catch: a version of Transformers that has renamed a method or one of its parameters."""
    method = getattr(owner, name, None)
    assert method is not None, missing(f"{owner.__name__}.{name}")
    parameters = inspect.signature(method).parameters.values()
    required = [parameter.name for parameter in parameters if parameter.default is inspect.Parameter.empty]
    assert required == expected.split(), missing(f"{owner.__name__}.{name}")


def test_private_attributes_are_set_by_generate() -> None:
    """In what it passes to a `custom_generate` callable."""
    seen: dict[str, Any] = {}

    def record(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        seen.update(kwargs)
        return input_ids

    inputs = {**prompts(1), CACHE: DynamicCache()}
    inspect.unwrap(GenerationMixin.generate)(tiny_model("llama"), **inputs, max_new_tokens=4, custom_generate=record)
    assert all(is_set(seen) for is_set in SET_BY_GENERATE.values()), missing(str(list(SET_BY_GENERATE)))


def test_private_attributes_of_models_exist() -> None:
    """Would catch: a version of Transformers without an attribute, where a default would hide that."""
    assert getattr(PreTrainedModel, "_is_stateful", None) is False, missing("PreTrainedModel._is_stateful")
    assert compat.is_stateful(tiny_model("qwen3_next")), missing("PreTrainedModel._is_stateful")
    for architecture, expected in (("llama", "sdpa"), ("gemma2", "eager")):
        config = tiny_model(architecture).config
        assert hasattr(config, "_attn_implementation"), missing("PreTrainedConfig._attn_implementation")
        assert compat.attention_implementation(config) == expected
    for name in ("_get_torch_distributed_world_size", "is_fsdp_managed_module", "is_deepspeed_zero3_enabled"):
        assert hasattr(generation_utils, name), missing(f"transformers.generation.utils.{name}")
    assert not compat.is_sharded(tiny_model("llama"))
    function: Any = lambda row, text: [1]  # noqa: E731
    name = "PrefixConstrainedLogitsProcessor._prefix_allowed_tokens_fn"
    assert compat.prefix_function(PrefixConstrainedLogitsProcessor(function, 1)) is function, missing(name)


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_private_symbols_are_used_in_two_files_only(file: Path) -> None:
    """Would catch: a private symbol that breaks with the next Transformers and that no test here names."""
    if file in FILES:
        return
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not names & PRIVATE, f"{file.name} must use hf_specgen.compat or transformers_batching"


def test_private_symbols_of_the_two_files_are_checked_here() -> None:
    """Would catch: a private symbol added to one of the files without a test."""
    nodes = [node for file in FILES for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))]
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    names |= {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    names |= {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    private = {name for name in names if name.startswith("_") and name.isidentifier() and not name.startswith("__")}
    own = {name for name in private if name.startswith("_hf_specgen_")}
    assert private - own == PRIVATE | OF_OTHER_LIBRARIES


def test_requests_of_continuous_batching_have_their_private_attributes() -> None:
    """Would catch: a request whose prompt length or ends are read wrongly once it was evicted."""
    state = RequestState("req_7", [1, 2, 3], eos_token_id=[5])
    assert transformers_batching.prompt_length(state) == 3, missing("RequestState")
    assert transformers_batching.request_number(state) == 7, missing("RequestState.request_id")
    assert transformers_batching.end_tokens(state) == {5}, missing("RequestState._eos_token_ids")
    evicted = state.create_equivalent_initial_request()
    evicted.initial_tokens.append(4)
    assert transformers_batching.prompt_length(evicted) == 3, missing("RequestState._true_initial_tokens")


def test_without_compilation_finds_every_way_to_compile() -> None:
    """Would catch: names that `torch.compile` no longer leaves behind, so that every step compiles anew."""
    part = torch.nn.Sequential(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    assert not isinstance(compat.without_compilation(part), nullcontext), missing("OptimizedModule._orig_mod")
    module = torch.nn.Linear(2, 2)
    assert isinstance(compat.without_compilation(module), nullcontext)
    module.compile(backend="eager")
    assert not isinstance(compat.without_compilation(module), nullcontext), missing("Module._compiled_call_impl")
    module = torch.nn.Linear(2, 2)
    module.forward = torch.compile(module.forward, backend="eager")
    assert not isinstance(compat.without_compilation(module), nullcontext), missing("_torchdynamo_orig_callable")
    assert compat.unwrapped(torch.compile(module, backend="eager")) is module, missing("OptimizedModule._orig_mod")


def test_without_compilation_in_overlapping_calls_restores_the_stance_after_the_last() -> None:
    """Would catch: a call that restores what it found, so that another compiles each step anew, or nothing ever again.

    The first call ends before the second, as in two threads.
    """
    compiled = list[Any]()
    module = torch.nn.Linear(2, 2)
    backend: Any = lambda graph, inputs: compiled.append(graph) or graph.forward  # noqa: E731
    module.forward = torch.compile(lambda states: states + 1, backend=backend)
    first, second = ExitStack(), ExitStack()
    for stack in (first, second):
        stack.enter_context(compat.without_compilation(module))
    first.close()
    module(torch.ones(1, 2))
    assert not compiled, "the second call is running"
    second.close()
    module(torch.ones(1, 2))
    assert compiled, "no call is running"
