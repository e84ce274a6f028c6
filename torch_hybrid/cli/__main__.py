"""Run the command line by ``python -m torch_hybrid.cli``."""

from torch_hybrid.cli import main

main()
