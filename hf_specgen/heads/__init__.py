"""Small trained parts that guess from a target's hidden states, and where they attach to it."""

from hf_specgen.heads.exit_head import ExitHead, load_exit_head

__all__ = ["ExitHead", "load_exit_head"]
