"""Independent truth for the models: torchvision's ResNet-50 (v1.5) and transformers' BERT in float64.

Every parameter is filled by a rule anyone can repeat with NumPy (`fill`), so another implementation can take the same
weights under its own names and must produce the same logits, loss and gradient norms. Run with torch, torchvision and
transformers installed: python make.py
"""

import json
import zlib

import numpy as np
import torch


def fill(name, shape):
    """Value of the parameter `name` (PyTorch's name and layout) with `shape`, float64."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    values = rng.standard_normal(shape)
    if len(shape) > 1:
        return values / np.sqrt(np.prod(shape[1:]))
    return 1 + 0.1 * values if name.endswith("weight") else 0.1 * values


def load(model):
    model.double().train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(fill(name, tuple(parameter.shape))))


def record(model, logits, loss, path, **extra):
    loss.backward()
    norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
    shapes = {n: list(p.shape) for n, p in model.named_parameters()}
    with open(path, "w") as file:
        json.dump(
            {
                "parameters": sum(p.numel() for p in model.parameters()),
                "loss": loss.item(),
                "shapes": shapes,
                "logits": np.round(logits.detach().numpy(), 10).tolist(),
                "gradient_norms": norms,
                **extra,
            },
            file,
        )


def resnet():
    import torchvision

    model = torchvision.models.resnet50()
    load(model)
    images = torch.from_numpy(np.random.default_rng(1).standard_normal((4, 3, 64, 64)))
    labels = torch.tensor([3, 141, 592, 999])
    logits = model(images)
    loss = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1)
    record(
        model,
        logits[:, :16],
        loss,
        "resnet50.json",
        labels=labels.tolist(),
        images="default_rng(1).standard_normal((4, 3, 64, 64)), NCHW",
        label_smoothing=0.1,
        logits_are="the first 16 of 1000, batch statistics, epsilon 1e-5",
        running_mean_norm=float(model.layer4[2].bn3.running_mean.norm()),
        running_var_norm=float(model.layer4[2].bn3.running_var.norm()),
    )


def bert():
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        vocab_size=120,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    model = BertForMaskedLM(config)
    load(model)
    rng = np.random.default_rng(2)
    ids = torch.from_numpy(rng.integers(5, 120, (3, 24)))
    mask = torch.ones(3, 24, dtype=torch.long)
    mask[1, 17:] = 0
    mask[2, 5:] = 0
    positions = [[1, 4, 9, 20], [0, 3, 8, 16], [0, 1, 2, 4]]
    targets = torch.from_numpy(rng.integers(5, 120, (3, 4)))
    logits = model(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids)).logits
    picked = torch.stack([logits[row, index] for row, index in enumerate(positions)])
    loss = torch.nn.functional.cross_entropy(picked.flatten(0, 1), targets.flatten())
    record(
        model,
        picked[..., :16],
        loss,
        "bert_tiny.json",
        input_ids=ids.tolist(),
        attention_mask=mask.tolist(),
        masked_positions=positions,
        targets=targets.tolist(),
        config=dict(
            vocab_size=120,
            hidden_size=64,
            layers=2,
            heads=4,
            intermediate_size=256,
            max_positions=32,
            layer_norm_epsilon=1e-12,
        ),
        logits_are="the first 16 of 120 at masked_positions; the head's output matrix is the word embedding; exact GELU",
    )


if __name__ == "__main__":
    resnet()
    bert()
