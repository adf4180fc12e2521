"""GPU kernels of tfbench's own, compiled by XLA from Triton's intermediate representation."""
