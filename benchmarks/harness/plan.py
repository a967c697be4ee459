"""What a run measures. Every field of `Plan` is an option of `python -m benchmarks suite`, saved with the results."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

QUICK = {
    "domains": ("embedded",),
    "prompts": 1,
    "tuning_prompts": 3,
    "max_new_tokens": 16,
    "repeats": 1,
    "sweep_prompts": 1,
    "batches": (4,),
    "temperatures": (),
    "contexts": (),
    "memory_context": 512,
}
"""Replaced by `Plan.quick`, except where a plan leaves the part out."""
DTYPES = ("float32", "bfloat16", "float16")
WIDE: dict[str, Any] = {"widen": 300_000_000, "dtype": "bfloat16"}
"""The bundled model widened to 300M parameters, as a latency model of a larger target."""
WIDE_FLOAT32: dict[str, Any] = {**WIDE, "dtype": "float32"}
"""The same on CPUs without matrix instructions for bfloat16."""


def _option(default: Any, description: str) -> Any:
    return field(default=default, metadata={"help": description})


@dataclass(frozen=True)
class Plan:
    """The settings of a run; tuples are given on the command line with commas between their elements."""

    model: str = _option("", "Hub id or folder of the target; the bundled model if empty")
    strategies: tuple[str, ...] = _option(
        ("ngram", "draft", "layerskip", "medusa"),
        "ngram, auto, draft=MODEL, layerskip=ADAPTER or =LAYER, medusa=HEADS, eagle=HEAD, dspark=HEAD, or several "
        "combined with +",
    )
    default_settings: bool = _option(False, "measure strategies with their default settings instead of choosing them")
    peers: tuple[str, ...] = _option(("transformers",), "transformers: the same strategies in Transformers; or empty")
    domains: tuple[str, ...] = _option(("default",), "domains or sets of benchmarks/workloads/domains.yaml")
    prompts: int = _option(4, "measured prompts per domain")
    tuning_prompts: int = _option(6, "further prompts, from all domains, on which the settings are chosen")
    max_new_tokens: int = _option(48, "tokens per answer")
    repeats: int = _option(2, "repeats of every domain")
    sweep_prompts: int = _option(3, "prompts or batches at each point of a sweep, with answers of half the length")
    batches: tuple[int, ...] = _option((1, 2, 4, 8, 16), "batch sizes to sweep; empty for none")
    temperatures: tuple[float, ...] = _option((0.0, 0.7, 1.0, 1.3), "temperatures to sweep")
    contexts: tuple[int, ...] = _option((128, 512, 1024), "context lengths to sweep")
    memory_context: int = _option(0, "tokens of context at which peak memory is measured; 0 for none")
    profile: str = _option("", "latency profile: k='auto' decides by it, and speedups are projected with it")
    seed: int = _option(0, "seed of the sampled domains")
    dtype: str = _option("float32", "float32, bfloat16 or float16")
    device: str = _option("cpu", "cpu, cuda, mps …")
    graphs: bool = _option(False, "passes captured as CUDA graphs for all sides; needs a GPU and no peers")
    widen: int = _option(0, "pad the model to this number of parameters, with the same function; 0: not padded")

    def __post_init__(self) -> None:
        for name in ("prompts", "tuning_prompts", "max_new_tokens", "repeats", "sweep_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("memory_context", "widen"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        if min([*self.batches, *self.contexts], default=1) < 1 or min(self.temperatures, default=0) < 0:
            raise ValueError("batch sizes and contexts must be at least 1, temperatures at least 0")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.graphs and (self.peers or self.device == "cpu"):
            raise ValueError(
                "graphs needs a GPU, and no side that runs eagerly: give --peers '' --device cuda, or leave it out"
            )

    @property
    def execution(self) -> str:
        """How all sides of the comparison run."""
        return "with CUDA graphs" if self.graphs else "eagerly"

    def quick(self) -> Plan:
        """The same plan with so little work that it takes a minute: too little for results to quote."""
        present = {name: value for name, value in QUICK.items() if getattr(self, name)}
        return replace(self, **present)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Suite:
    """A plan, the table that is printed, and the tables that are saved (empty: all)."""

    plan: Plan
    table: str = "by domain"
    tables: tuple[str, ...] = ()
