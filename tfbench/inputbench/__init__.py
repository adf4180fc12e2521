"""The input pipeline alone, without a model: how fast this host can feed a training."""
