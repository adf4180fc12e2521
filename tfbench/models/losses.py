"""Per-example losses: what a step sums over its replicas and divides by the global batch."""

from typing import Any, NamedTuple

import tensorflow as tf

# Mean and standard deviation of ImageNet's training images on the 0-255 scale, per RGB channel, as
# torchvision and most published recipes use them (0.485, 0.456, 0.406 and 0.229, 0.224, 0.225 times 255).
IMAGE_MEAN = (123.675, 116.28, 103.53)
IMAGE_STANDARD_DEVIATION = (58.395, 57.12, 57.375)
LABEL_SMOOTHING = 0.1


class PerExample(NamedTuple):
    """float32 tensors of shape [B]."""

    loss: Any
    correct: Any  # right predictions
    predictions: Any  # predictions made


def normalize(image: Any, dtype: Any) -> Any:
    """uint8 [B, H, W, 3] → standardised, in `dtype`; a floating image is taken as standardised already."""
    if image.dtype != tf.uint8:
        return tf.cast(image, dtype)
    standard = (tf.cast(image, tf.float32) - IMAGE_MEAN) / IMAGE_STANDARD_DEVIATION
    return tf.cast(standard, dtype)


def classification_loss(model: Any, batch: dict[str, Any], training: bool, seed: Any) -> PerExample:
    """Cross-entropy with label smoothing of an image classifier; see ModelSpec for the batch."""
    del seed  # no dropout in these models
    logits = model(normalize(batch["image"], model.compute_dtype), training=training)
    label = batch["label"]
    chosen = tf.gather(logits, label, batch_dims=1)
    smoothed = (1 - LABEL_SMOOTHING) * chosen + LABEL_SMOOTHING * tf.reduce_mean(logits, axis=-1)
    loss = tf.reduce_logsumexp(logits, axis=-1) - smoothed
    correct = tf.cast(tf.argmax(logits, axis=-1, output_type=label.dtype) == label, tf.float32)
    return PerExample(loss, correct, tf.ones_like(correct))


def masked_language_model_loss(model: Any, batch: dict[str, Any], training: bool, seed: Any) -> PerExample:
    """Cross-entropy at the masked places, averaged over the places that each sequence uses."""
    logits = model(batch, training=training, seed=seed)  # [B, K, vocab_size]
    target, weight = batch["masked_ids"], tf.cast(batch["masked_weights"], logits.dtype)
    each = tf.nn.sparse_softmax_cross_entropy_with_logits(target, logits)
    loss = tf.reduce_sum(each * weight, axis=-1) / tf.maximum(tf.reduce_sum(weight, axis=-1), 1)
    right = tf.cast(tf.argmax(logits, axis=-1, output_type=target.dtype) == target, weight.dtype)
    used = tf.cast(tf.reduce_sum(weight, axis=-1), tf.float32)
    return PerExample(loss, tf.cast(tf.reduce_sum(right * weight, axis=-1), tf.float32), used)
