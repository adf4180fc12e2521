"""The Keras model of `tfbench.models.resnet`; imported when a ResNet is built."""

from typing import Any

import keras
import tensorflow as tf

from tfbench.models.layers import Convolution, FusedBatchNorm, Linear, relu_max_pool
from tfbench.models.resnet import ResNetShape, convolutions


class ResNet(keras.Model):
    """Images [B, S, S, 3] in the compute dtype → float32 logits [B, num_classes].

    `parts` holds every layer under torchvision's name, e.g. `layer1.0.conv1`, `layer1.0.bn1`, `fc`.
    """

    def __init__(self, shape: ResNetShape, image_size: int):
        super().__init__()
        self.shape = shape
        self.parts: dict[str, Any] = {}
        for layer in convolutions(shape, image_size):
            self.parts[layer.name] = Convolution(
                layer.in_channels, layer.out_channels, layer.kernel, layer.stride
            )
            # Every gamma begins with 1, as torchvision's and Keras' do. With zeros in a block's last norm all
            # gradients in the block are zeros, which need less power: a card at its limit would be too fast.
            self.parts[_norm_name(layer.name)] = FusedBatchNorm(layer.out_channels)
        self.parts["fc"] = Linear(shape.features, shape.num_classes, standard_deviation=0.01)
        self.built = True

    def call(self, x: Any, training: bool = False) -> Any:
        """See the class."""
        x = relu_max_pool(self._convolve("conv1", x, training))
        for stage, blocks in enumerate(self.shape.blocks):
            for block in range(blocks):
                x = self._block(f"layer{stage + 1}.{block}", x, training)
        pooled = tf.reduce_mean(tf.cast(x, self._accumulate_dtype(x)), axis=[1, 2])
        logits = self.parts["fc"](tf.cast(pooled, x.dtype))
        return tf.cast(logits, self._accumulate_dtype(x))

    def _block(self, name: str, x: Any, training: bool) -> Any:
        """A bottleneck: 1×1, 3×3 (with the stride), 1×1, plus the shortcut."""
        y = tf.nn.relu(self._convolve(f"{name}.conv1", x, training))
        y = tf.nn.relu(self._convolve(f"{name}.conv2", y, training))
        y = self._convolve(f"{name}.conv3", y, training)
        if f"{name}.downsample.0" in self.parts:
            x = self._convolve(f"{name}.downsample.0", x, training)
        return tf.nn.relu(x + y)

    def _convolve(self, name: str, x: Any, training: bool) -> Any:
        """Convolution and its batch norm."""
        return self.parts[_norm_name(name)](self.parts[name](x), training=training)

    @staticmethod
    def _accumulate_dtype(x: Any) -> Any:
        """float32 for the pooling's sum and the logits under every policy but the float64 of proofs."""
        return tf.float64 if x.dtype == tf.float64 else tf.float32


def _norm_name(convolution_name: str) -> str:
    """Torchvision's batch norm behind a convolution: conv1 → bn1, downsample.0 → downsample.1."""
    if convolution_name.endswith("downsample.0"):
        return convolution_name.removesuffix("0") + "1"
    return convolution_name.replace("conv", "bn")
