"""The same training step in PyTorch, on the same card: what tfbench's figures are compared with.

Not part of the package; needs torch, torchvision and transformers. Prints one line and appends a row:

    python benchmarks/pytorch_peer.py --model=resnet50 --batch=512 --csv=peers.csv

Alike with `python -m tfbench.train`: batch on the GPU, float16 autocast with loss scaling (or bfloat16), SGD
with momentum for ResNet-50 v1.5 (channels_last), fused AdamW for BERT-large (SDPA, dropout 0.1, the output
layer at the masked places only), `torch.compile`, windows synchronised at both edges, and a finite
loss at the end.
"""

import argparse
import csv
import datetime
import math
import os
import statistics
import time

import torch

# tfbench's, as are warm-up and loss scale: what a card at its power limit reaches depends on the values.
LEARNING_RATES = {"resnet50": 0.1, "bert_large": 1e-4}
MASKED_SHARE, MAX_MASKED = 0.15, {128: 20, 512: 80}  # places predicted in a sequence, as tfbench has them


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("resnet50", "bert_large"), default="resnet50")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--compile", choices=("none", "default", "max-autotune"), default="default")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--windows", type=int, default=6)
    parser.add_argument("--warmup_steps", type=int, default=20)
    parser.add_argument("--lr_warmup_steps", type=int, default=10_000)
    parser.add_argument("--csv", default="peers.csv")
    return parser.parse_args()


def resnet50(args: argparse.Namespace):
    """Model, optimizer, and a function of the model that gives the loss."""
    import torchvision

    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), LEARNING_RATES[args.model], momentum=0.9, weight_decay=5e-5
    )
    images = torch.randn(args.batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (args.batch,), device="cuda")
    return model, optimizer, lambda net: torch.nn.functional.cross_entropy(net(images), labels)


def bert_large(args: argparse.Namespace):
    """As resnet50."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = BertForMaskedLM(config).cuda()
    optimizer = torch.optim.AdamW(
        model.parameters(), LEARNING_RATES[args.model], weight_decay=0.01, fused=True
    )
    ids = torch.randint(0, 30522, (args.batch, args.seq_length), device="cuda")
    mask = torch.ones_like(ids)
    places = MAX_MASKED.get(args.seq_length, math.ceil(MASKED_SHARE * args.seq_length))
    positions = torch.rand(args.batch, args.seq_length, device="cuda").argsort(1)[:, :places]
    labels = torch.randint(0, 30522, (args.batch, places), device="cuda")

    def loss(net):
        hidden = net.bert(ids, attention_mask=mask).last_hidden_state
        picked = hidden.gather(1, positions[:, :, None].expand(-1, -1, hidden.shape[-1]))
        return torch.nn.functional.cross_entropy(net.cls(picked).float().flatten(0, 1), labels.flatten())

    return model, optimizer, loss


def main() -> None:
    """Measure and record."""
    args = parse()
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    started = time.monotonic()
    model, optimizer, loss_of = {"resnet50": resnet50, "bert_large": bert_large}[args.model](args)
    model.train()
    dtype = getattr(torch, args.dtype)
    scaler = torch.amp.GradScaler(init_scale=2.0**15, enabled=dtype is torch.float16)  # tfbench's
    schedule = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1 / max(args.lr_warmup_steps, 1), 1, args.lr_warmup_steps
    )
    forward = loss_of
    if args.compile != "none":
        mode = None if args.compile == "default" else args.compile
        forward = torch.compile(loss_of, mode=mode)

    def step():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype):
            loss = forward(model)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        return loss

    float(step())
    first_step_s = time.monotonic() - started
    for _ in range(args.warmup_steps):
        step()
    seconds = []
    each = args.steps // args.windows
    for _ in range(args.windows):
        torch.cuda.synchronize()
        begin = time.monotonic()
        for _ in range(each):
            loss = step()
        torch.cuda.synchronize()
        seconds.append(time.monotonic() - begin)
    rates = [each * args.batch / value for value in seconds]
    row = {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "framework": f"torch {torch.__version__}", "model": args.model, "batch": args.batch,
        "seq_length": args.seq_length if args.model == "bert_large" else "", "dtype": args.dtype,
        "compile": args.compile, "learning_rate": LEARNING_RATES[args.model],
        "lr_warmup_steps": args.lr_warmup_steps,
        "samples_per_sec": round(args.batch * each * args.windows / sum(seconds), 2),
        "window_deviation_percent": round(100 * statistics.stdev(rates) / statistics.fmean(rates), 3),
        "time_to_first_step_s": round(first_step_s, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss_last": round(float(loss), 4), "loss_finite": math.isfinite(float(loss)),
        "gpu_name": torch.cuda.get_device_name(),
        "cudnn": torch.backends.cudnn.version(), "cuda": torch.version.cuda,
    }  # fmt: skip
    print("RESULT", row, flush=True)
    new = not os.path.exists(args.csv)
    with open(args.csv, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, row)
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()
