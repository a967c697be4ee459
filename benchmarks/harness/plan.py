"""What a run measures. Every field is an option of `benchmarks/run.py`, and is saved with the results."""

from __future__ import annotations

from dataclasses import dataclass, replace

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
    "trace_texts": 1,
}


@dataclass(frozen=True)
class Plan:
    """A run.

    Args:
        model: Hub id or folder of the target; the embedded model if empty.
        strategies, peers: as `strategies.build` reads them.
        domains: names of domains or sets.
        prompts: measured conversations per domain.
        tuning_prompts: further conversations, from the domains in turn, on which each strategy's setting is chosen.
        max_new_tokens: per answer.
        repeats: of everything in the domains.
        sweep_prompts: prompts or batches at each point of a sweep, answered at half the length.
        batches, temperatures, contexts: what is swept; nothing for no sweep.
        trace_texts: recorded texts to replay, and texts of synthetic acceptance; 0 for none.
        seed: of sampling; each prompt and repeat has its own from there.
        dtype, device: of the target.
        widen: parameters of the same function with more weights (`widen.py`), to be measured instead; 0 for none.
    """

    model: str = ""
    strategies: tuple[str, ...] = ("ngram", "draft", "layerskip", "medusa")
    peers: tuple[str, ...] = ("transformers",)
    domains: tuple[str, ...] = ("default",)
    prompts: int = 4
    tuning_prompts: int = 6
    max_new_tokens: int = 48
    repeats: int = 2
    sweep_prompts: int = 3
    batches: tuple[int, ...] = (1, 2, 4, 8, 16)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0, 1.3)
    contexts: tuple[int, ...] = (128, 512, 1024)
    trace_texts: int = 10
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    widen: int = 0

    def __post_init__(self) -> None:
        for name in ("prompts", "tuning_prompts", "max_new_tokens", "repeats", "sweep_prompts"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if min([*self.batches, *self.contexts], default=1) < 1 or min(self.temperatures, default=0) < 0:
            raise ValueError("batch sizes and contexts must be at least 1, temperatures at least 0")
        if self.dtype not in ("float32", "bfloat16", "float16"):
            raise ValueError(f"dtype must be float32, bfloat16 or float16, got {self.dtype!r}")

    def quick(self) -> Plan:
        """The same with so little of everything that it takes a minute; too little for figures to quote."""
        return replace(self, **QUICK)  # type: ignore[arg-type]
