"""Measuring without TensorFlow: timed windows, telemetry, arithmetic on both, and plausibility gates."""
