"""The same training step in PyTorch, on the same card: what tfbench's figures are compared with.

Not part of the package; needs torch, torchvision and transformers. Prints one line and appends a row:

    python benchmarks/pytorch_peer.py --model=resnet50 --batch=512 --csv=peers.csv

Alike with `python -m tfbench.train`: batch on the GPU, float16 autocast with loss scaling (or bfloat16), SGD
with momentum and smoothed labels for ResNet-50 v1.5 (channels_last), AdamW for BERT-large (dropout 0.1, the
output layer at the masked places only), no weight decay on norms and biases, and windows synchronised at both
edges. PyTorch's best: `torch.compile`, fused optimizers (others read the loss scale's verdict on the host in
every step) and attention without a mask, which flash attention does not take, as no token is padding here.
Exit code: 1 where the last loss is not finite. With --cpu everything is tiny: a dry run.
"""

import argparse
import csv
import datetime
import importlib.metadata
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

# tfbench's, as are warm-up, loss scale and decay: the values decide what a card at its power limit reaches.
LEARNING_RATES = {"resnet50": 0.1, "bert_large": 1e-4}
LABEL_SMOOTHING, ADAM_EPSILON = 0.1, 1e-6
MASKED_SHARE = 0.15  # of the places, up to a multiple of 4
COMPILE = ("none", "default", "reduce-overhead", "max-autotune")


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("resnet50", "bert_large"), default="resnet50")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--compile", choices=COMPILE, default="default")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--warmup_steps", type=int, default=20)
    parser.add_argument("--lr_warmup_steps", type=int, default=10_000)
    parser.add_argument("--csv", default="peers.csv")
    parser.add_argument("--cpu", action="store_true", help="dry run on the CPU")
    args = parser.parse_args()
    if args.windows < 2:
        parser.error(f"--windows={args.windows}: 2 or more are accepted")
    if args.steps < 1 or args.steps % args.windows:
        parser.error(f"--steps={args.steps}: a multiple of --windows={args.windows} is accepted")
    args.device = "cpu" if args.cpu else "cuda"
    return args


def decayed(model: torch.nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameters in two groups: those of norms and biases are not decayed."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def resnet50(args: argparse.Namespace) -> tuple[Any, Any, Callable[[Any], Any]]:
    """Model, optimizer, and a function of the model that gives the loss."""
    import torchvision

    pixels = 64 if args.cpu else 224
    model = torchvision.models.resnet50().to(args.device, memory_format=torch.channels_last)
    rate = LEARNING_RATES[args.model]
    optimizer = torch.optim.SGD(decayed(model, 5e-5), rate, momentum=0.9, fused=True)
    images = torch.randn(args.batch, 3, pixels, pixels, device=args.device)
    images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (args.batch,), device=args.device)

    def loss(net: Any) -> Any:
        return torch.nn.functional.cross_entropy(net(images), labels, label_smoothing=LABEL_SMOOTHING)

    return model, optimizer, loss


def bert_large(args: argparse.Namespace) -> tuple[Any, Any, Callable[[Any], Any]]:
    """As resnet50."""
    from transformers import BertConfig, BertForMaskedLM

    leave_out_the_mask()
    layers = {"num_hidden_layers": 2} if args.cpu else {"num_hidden_layers": 24}
    config = BertConfig(
        hidden_size=1024, num_attention_heads=16, intermediate_size=4096, attn_implementation="sdpa", **layers
    )
    model = BertForMaskedLM(config).to(args.device)
    rate = LEARNING_RATES[args.model]
    optimizer = torch.optim.AdamW(decayed(model, 0.01), rate, eps=ADAM_EPSILON, fused=True)
    shape = (args.batch, args.seq_length)
    ids = torch.randint(0, 30522, shape, device=args.device)
    places = math.ceil(MASKED_SHARE * args.seq_length / 4) * 4
    positions = torch.rand(shape, device=args.device).argsort(1)[:, :places]
    labels = torch.randint(0, 30522, (args.batch, places), device=args.device)

    def loss(net: Any) -> Any:
        hidden = net.bert(ids).last_hidden_state
        picked = hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[-1]))
        return torch.nn.functional.cross_entropy(net.cls(picked).float().flatten(0, 1), labels.flatten())

    return model, optimizer, loss


def leave_out_the_mask() -> None:
    """Attention without its mask: where none is given, some versions of transformers make one of ones."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def unmasked(query: Any, key: Any, value: Any, attn_mask: Any = None, **others: Any) -> Any:
        assert not others.get("is_causal")
        return attention(query, key, value, **others)

    torch.nn.functional.scaled_dot_product_attention = unmasked


def main() -> None:
    """Measure and record."""
    args = parse()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    started = time.monotonic()
    model, optimizer, loss_of = {"resnet50": resnet50, "bert_large": bert_large}[args.model](args)
    step = training_step(args, model.train(), optimizer, loss_of)
    float(step())
    first_step_s = time.monotonic() - started
    for _ in range(args.warmup_steps):
        step()
    seconds, loss = measured(args, step)
    each = args.steps // args.windows
    rates = [each * args.batch / value for value in seconds]
    row = {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "framework": f"torch {torch.__version__}", "transformers": transformers_version(args),
        "model": args.model, "batch": args.batch,
        "seq_length": args.seq_length if args.model == "bert_large" else "", "dtype": args.dtype,
        "compile": args.compile, "learning_rate": LEARNING_RATES[args.model],
        "lr_warmup_steps": args.lr_warmup_steps,
        "label_smoothing": LABEL_SMOOTHING * (args.model == "resnet50"),
        "optimizer_fused": True, "attention_masked": False,
        "samples_per_sec": round(args.batch * args.steps / sum(seconds), 2),
        "window_deviation_percent": round(100 * statistics.stdev(rates) / statistics.fmean(rates), 3),
        "time_to_first_step_s": round(first_step_s, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss_last": round(loss, 4), "loss_finite": math.isfinite(loss),
        "gpu_name": "CPU" if args.cpu else torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda,
    }  # fmt: skip
    print("RESULT", row, flush=True)
    append(args.csv, row)
    sys.exit(not math.isfinite(loss))


def transformers_version(args: argparse.Namespace) -> str:
    """Of the package that the model comes from; empty for ResNet-50."""
    return importlib.metadata.version("transformers") if args.model == "bert_large" else ""


def training_step(
    args: argparse.Namespace, model: Any, optimizer: Any, loss_of: Callable[[Any], Any]
) -> Callable[[], Any]:
    """A function that makes one update and gives the loss before it, a tensor."""
    dtype = getattr(torch, args.dtype)
    scaler = torch.amp.GradScaler(  # the scale is tfbench's
        args.device, init_scale=2.0**15, enabled=dtype is torch.float16
    )
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1 / max(args.lr_warmup_steps, 1), 1, args.lr_warmup_steps
    )
    forward = loss_of
    if args.compile != "none":
        forward = torch.compile(loss_of, mode=None if args.compile == "default" else args.compile)

    def step() -> Any:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(args.device, dtype):
            loss = forward(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss.detach()

    return step


def measured(args: argparse.Namespace, step: Callable[[], Any]) -> tuple[list[float], float]:
    """Seconds of each window, and the last loss."""
    seconds = []
    for _ in range(args.windows):
        synchronize(args)
        began = time.monotonic()
        for _ in range(args.steps // args.windows):
            loss = step()
        synchronize(args)
        seconds.append(time.monotonic() - began)
    return seconds, float(loss)


def synchronize(args: argparse.Namespace) -> None:
    """Wait for the GPU."""
    if not args.cpu:
        torch.cuda.synchronize()


def append(path: str, row: dict[str, Any]) -> None:
    """A row of the CSV file.

    Raises:
        ValueError: the file has other columns.
    """
    new = not os.path.exists(path)
    if not new:
        with open(path, newline="", encoding="utf-8") as file:
            if next(csv.reader(file)) != list(row):
                raise ValueError(f"--csv={path} has other columns; the row is printed above")
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
