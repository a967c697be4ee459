"""Draft heads: small trained modules that propose tokens from the target's hidden states, and their file formats."""

from hf_specgen.heads.dspark import DSparkConfig, DSparkHead
from hf_specgen.heads.exit_head import ExitHead, load_exit_head
from hf_specgen.heads.export import save_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads
from hf_specgen.heads.medusa_formats import load_medusa

__all__ = [
    "DSparkConfig",
    "DSparkHead",
    "ExitHead",
    "MedusaConfig",
    "MedusaHeads",
    "load_exit_head",
    "load_head",
    "load_medusa",
    "save_head",
]
