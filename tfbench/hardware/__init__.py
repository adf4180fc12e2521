"""The machine: its GPUs through NVML, their peaks, published results to stand beside. TensorFlow-free."""
