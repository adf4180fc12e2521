"""The parts of `python -m tfbench.micro`: what this machine reaches at one thing at a time."""
