"""The one place for number formats: Keras' policy, the TF32 switch, the loss scale.

Known without TensorFlow; `apply` imports it.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class PrecisionSpec:
    """A way to compute.

    Attributes:
        policy: Keras' dtype policy; variables are float32 under all of them.
        tensor_float_32: whether float32 products may use the TF32 units (10 bits of mantissa).
        scales_loss: gradients of this format underflow without a loss scale.
        least_compute_capability: of the cards whose matrix units know the format.
    """

    policy: str
    tensor_float_32: bool
    scales_loss: bool
    least_compute_capability: tuple[int, int] | None


PRECISIONS: dict[str, PrecisionSpec] = {
    "fp32": PrecisionSpec("float32", False, False, None),
    "tf32": PrecisionSpec("float32", True, False, (8, 0)),
    "mixed_float16": PrecisionSpec("mixed_float16", True, True, (7, 0)),
    "mixed_bfloat16": PrecisionSpec("mixed_bfloat16", True, False, (8, 0)),
}


def fastest_precision(compute_capability: tuple[int, int] | None) -> str:
    """The fastest precision that a device runs well; None stands for the CPU.

    Both half precisions run at the same rate from 8.0 on; float16 keeps three more bits.
    """
    if compute_capability is None or compute_capability < (7, 0):
        return "fp32"
    return "mixed_float16"


def apply(precision: str) -> PrecisionSpec:
    """Set Keras' and TensorFlow's process-wide switches, before the model is built.

    Args:
        precision: a name in PRECISIONS.
    """
    import keras
    import tensorflow as tf

    spec = PRECISIONS[precision]
    keras.config.set_dtype_policy(spec.policy)
    tf.config.experimental.enable_tensor_float_32_execution(spec.tensor_float_32)
    return spec
