"""The models tfbench trains, by name. Known without TensorFlow: a spec's functions import it when called."""

from tfbench.models.bert import BERT_BASE, BERT_LARGE, BERT_TINY
from tfbench.models.resnet import RESNET50, RESNET_TINY
from tfbench.models.spec import ModelSpec

MODELS: dict[str, ModelSpec] = {
    spec.name: spec for spec in (RESNET50, RESNET_TINY, BERT_BASE, BERT_LARGE, BERT_TINY)
}

__all__ = ["MODELS", "ModelSpec"]
