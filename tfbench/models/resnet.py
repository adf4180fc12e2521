"""ResNet v1.5 (stride in the 3×3 convolution): one table of convolutions is both the net and its FLOPs."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from tfbench.config import BenchmarkConfig
from tfbench.models.spec import Defaults, ModelSpec

EXPANSION = 4  # a bottleneck's last convolution has this many times its width


@dataclasses.dataclass(frozen=True)
class ResNetShape:
    """Bottleneck blocks of each stage, and the width of the first."""

    blocks: tuple[int, ...]
    width: int
    num_classes: int = 1000

    @property
    def features(self) -> int:
        """Channels that reach the classifier."""
        return self.width * 2 ** (len(self.blocks) - 1) * EXPANSION


@dataclasses.dataclass(frozen=True)
class ConvolutionShape:
    """One convolution: square kernel, square images, padding (kernel - 1) / 2."""

    name: str  # torchvision's, e.g. layer2.0.conv1
    in_channels: int
    out_channels: int
    kernel: int
    stride: int
    in_size: int  # pixels on each side

    @property
    def out_size(self) -> int:
        """Pixels on each side of the result."""
        return -(-self.in_size // self.stride)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the forward pass of one image."""
        return self.out_size**2 * self.kernel**2 * self.in_channels * self.out_channels


def convolutions(shape: ResNetShape, image_size: int) -> Iterator[ConvolutionShape]:
    """Every convolution of the net in the order of the forward pass, a block's projection last."""
    stem = ConvolutionShape("conv1", 3, shape.width, 7, 2, image_size)
    yield stem
    size = -(-stem.out_size // 2)  # the 3×3 max pooling at stride 2
    channels = shape.width
    for stage, blocks in enumerate(shape.blocks):
        width = shape.width * 2**stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            prefix = f"layer{stage + 1}.{block}"
            yield ConvolutionShape(f"{prefix}.conv1", channels, width, 1, 1, size)
            yield ConvolutionShape(f"{prefix}.conv2", width, width, 3, stride, size)
            out_size = -(-size // stride)
            yield ConvolutionShape(f"{prefix}.conv3", width, width * EXPANSION, 1, 1, out_size)
            if not block:
                yield ConvolutionShape(f"{prefix}.downsample.0", channels, width * EXPANSION, 1, stride, size)
            channels, size = width * EXPANSION, out_size


def flops_per_sample(shape: ResNetShape, image_size: int) -> int:
    """Forward and backward pass of one image: three times the forward's products, 2 FLOPs a MAC."""
    head_macs = shape.features * shape.num_classes
    return 3 * 2 * (sum(layer.macs for layer in convolutions(shape, image_size)) + head_macs)


def _build(shape: ResNetShape, config: BenchmarkConfig) -> Any:
    from tfbench.models.resnet_model import ResNet

    assert config.image_size is not None
    return ResNet(shape, config.image_size)


def _loss(model: Any, batch: dict[str, Any], training: bool, seed: Any) -> Any:
    from tfbench.models.losses import classification_loss

    return classification_loss(model, batch, training, seed)


def _spec(name: str, shape: ResNetShape, **choices: Any) -> ModelSpec:
    return ModelSpec(
        name=name,
        kind="image",
        num_classes=shape.num_classes,
        build=lambda config: _build(shape, config),
        loss=_loss,
        flops_per_sample=lambda config: flops_per_sample(shape, config.image_size or 0),
        optimizer="sgd",
        learning_rate=0.1,
        weight_decay=5e-5,
        **choices,
    )


RESNET50_SHAPE = ResNetShape(blocks=(3, 4, 6, 3), width=64)
RESNET_TINY_SHAPE = ResNetShape(blocks=(1, 1), width=16)

RESNET50 = _spec(
    "resnet50",
    RESNET50_SHAPE,
    on_gpu=Defaults(
        per_replica_batch_size=1024, image_size=224, steps=200, warmup_steps=20, windows=10, steps_per_loop=10
    ),
    on_cpu=Defaults(
        per_replica_batch_size=8, image_size=128, steps=40, warmup_steps=2, windows=10, steps_per_loop=1
    ),
    activation_mib_per_sample=41.0,
    references=("resnet50_v1.5_train", "resnet50_train", "resnet50_v1.5_mlperf"),
)

RESNET_TINY = _spec(
    "resnet_tiny",
    RESNET_TINY_SHAPE,
    on_gpu=Defaults(
        per_replica_batch_size=256, image_size=32, steps=400, warmup_steps=40, windows=20, steps_per_loop=10
    ),
    on_cpu=Defaults(
        per_replica_batch_size=32, image_size=32, steps=200, warmup_steps=10, windows=10, steps_per_loop=5
    ),
    activation_mib_per_sample=0.3,
)
