"""Draft heads: small trained modules that propose tokens from the target's hidden states, and their file formats."""

from hf_specgen.heads.dspark import DSparkConfig, DSparkHead
from hf_specgen.heads.exit_head import ExitHead, load_exit_head
from hf_specgen.heads.export import export_head, save_head
from hf_specgen.heads.head_formats import load_head
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads

__all__ = [
    "DSparkConfig",
    "DSparkHead",
    "ExitHead",
    "MedusaConfig",
    "MedusaHeads",
    "export_head",
    "load_exit_head",
    "load_head",
    "save_head",
]
