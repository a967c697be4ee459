"""`python -m hf_specgen.cli`, for `accelerate launch -m hf_specgen.cli generate`."""

from hf_specgen.cli import main

main()
