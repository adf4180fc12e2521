"""PyTorch's matrix products and sums over GPUs beside tfbench.micro's, in turn on the same cards: A B A B.

    python benchmarks/pytorch_ceilings.py matmul --rounds=3 --csv=ceilings.csv
    python benchmarks/pytorch_ceilings.py all_reduce --rounds=2

Needs torch; --torch_python names an interpreter that has it, where tfbench's has not. A side's turn is a
process of its own; its figures become rows of --csv when it ends. Prints at the end, for each case, both
medians, their ratio and how far the rounds' ratios spread.

matmul: random operands, four left ones and one right one; 3 s of rest, a quarter of --seconds to warm up,
then nine windows synchronised at both edges. The figure of tfbench is the better one of TensorFlow's
operation and XLA's.
all_reduce: bus bandwidth over all GPUs that are visible, PyTorch by NCCL with a process for each GPU, as many
messages under way as tfbench.micro has. PyTorch's are zeros after the check, tfbench's are not.
With --cpu both run tiny on the CPU, over two devices: a dry run.
"""

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

SIDES = ("torch", "tfbench")
FORMATS = {"fp16": "float16", "bf16": "bfloat16", "tf32": "float32", "fp32": "float32"}
SUMMED = {"fp32": ("float32", 4), "fp16": ("float16", 2)}  # dtype and its bytes, as tfbench.micro has them
SIZES = (2**12, 2**16, 2**20, 2**24, 2**27, 2**30)  # of messages, bytes
WINDOWS, WARM_SHARE, REST_S = 9, 0.25, 3.0
CPU_DEVICES = 2


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("matmul", "all_reduce"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--size", type=int, default=8192, help="of the square matrices")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring a matrix product")
    parser.add_argument("--csv", default="ceilings.csv")
    parser.add_argument("--torch_python", default=sys.executable)
    parser.add_argument("--timeout_s", type=float, default=120, help="of a side's turn")
    parser.add_argument("--cpu", action="store_true", help="dry run on the CPU")
    parser.add_argument("--side", choices=SIDES, help="internal: what this process measures")
    parser.add_argument(
        "--under_way", type=json.loads, help="internal: messages summed at a time, by their bytes"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds={args.rounds}: 1 or more are accepted")
    return args


# Each side's two functions yield {"case", "rate", "unit", "error"}: the error is the largest one against
# float64 over the outputs' root mean square, or the share of wrong sums.


def torch_matmul(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """torch.matmul's TFLOP/s."""
    import torch

    device = "cpu" if args.cpu else "cuda"
    for name in formats(args):
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        dtype, shape = getattr(torch, FORMATS[name]), (args.size, args.size)
        lefts = [(torch.randn(shape, device=device) * args.size**-0.5).to(dtype) for _ in range(4)]
        right = torch.randn(shape, device=device).to(dtype)

        def call(lefts=lefts, right=right) -> list[Any]:
            return [torch.matmul(left, right) for left in lefts]

        truth = lefts[0][:8].double() @ right.double()
        error = float((call()[0][:8].double() - truth).abs().max() / truth.square().mean().sqrt())
        time.sleep(REST_S * (not args.cpu))
        each_s = seconds_each(call, lambda: args.cpu or torch.cuda.synchronize(), args.seconds)
        yield {"case": name, "rate": 4 * 2 * args.size**3 / each_s / 1e12, "unit": "TFLOP/s", "error": error}


def seconds_each(call: Callable[[], object], synchronize: Callable[[], object], seconds: float) -> float:
    """Of a call, the median over windows; as tfbench.microbench.timed does it."""
    calls = 1
    while (taken := window(call, synchronize, calls)) < WARM_SHARE * seconds:
        calls *= 2
    calls = max(1, round(calls * seconds / WINDOWS / taken))
    return statistics.median(window(call, synchronize, calls) for _ in range(WINDOWS)) / calls


def window(call: Callable[[], object], synchronize: Callable[[], object], calls: int) -> float:
    """Seconds that the calls take together."""
    synchronize()
    began = time.monotonic()
    for _ in range(calls):
        call()
    synchronize()
    return time.monotonic() - began


def torch_all_reduce(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Bus bandwidth of torch.distributed, GB/s; from the file that the first process writes."""
    import torch

    world = CPU_DEVICES if args.cpu else torch.cuda.device_count()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(torch_rank, args=(world, folder, args.cpu, args.under_way), nprocs=world)
        with open(f"{folder}/rows", encoding="utf-8") as file:
            yield from map(json.loads, file)


def torch_rank(rank: int, world: int, folder: str, cpu: bool, under_way: dict[str, int]) -> None:
    """One process of the sum; under_way: how many messages of so many bytes are summed at a time."""
    import torch
    from torch import distributed

    device = "cpu" if cpu else f"cuda:{rank}"
    if not cpu:
        torch.cuda.set_device(rank)
    distributed.init_process_group(
        "gloo" if cpu else "nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=world
    )
    for case, name, size in messages(cpu):
        dtype, width = SUMMED[name]
        shape, many = (size // width,), under_way[str(size)]
        tensors = [
            torch.full(shape, rank + 1.0, device=device, dtype=getattr(torch, dtype)) for _ in range(many)
        ]
        sum_all(tensors)
        wrong = float(not all((tensor == world * (world + 1) // 2).all() for tensor in tensors))
        for tensor in tensors:
            tensor.zero_()  # sums of sums would overflow
        # About 25 ms on a GPU; by the size alone, so that all ranks agree.
        calls = 5 if cpu else max(2, min(1000, round(0.025 / (20e-6 + size / 200e9) / many)))
        times = []
        for _ in range(WINDOWS + 1):
            distributed.barrier()
            times.append(window(lambda t=tensors: sum_all(t), lambda: cpu or torch.cuda.synchronize(), calls))
        if rank == 0:
            rate = 2 * (world - 1) / world * size * many * calls / statistics.median(times[1:]) / 1e9
            with open(f"{folder}/rows", "a", encoding="utf-8") as file:
                file.write(json.dumps({"case": case, "rate": rate, "unit": "GB/s", "error": wrong}) + "\n")
    distributed.destroy_process_group()


def sum_all(tensors: list[Any]) -> None:
    """Sum each over the processes, none waiting for another on the host."""
    from torch import distributed

    for handle in [distributed.all_reduce(tensor, async_op=True) for tensor in tensors]:
        handle.wait()


def tfbench_matmul(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """tfbench.micro's TFLOP/s."""
    from tfbench.microbench import matmul

    machine = opened(args, 1)
    for name in formats(args):
        found = []
        for engine in ("library", "xla"):
            time.sleep(REST_S * (not args.cpu))
            found.append(
                (engine, matmul.measure(machine.devices[0], name, (args.size,) * 3, engine, args.seconds))
            )
        yield best(name, found)


def tfbench_all_reduce(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """tfbench.micro's bus bandwidth, GB/s."""
    from tfbench.microbench import all_reduce

    machine = opened(args, None)
    for case, name, size in messages(args.cpu):
        engines = ("library",) if args.cpu else ("library", "xla")
        yield best(case, [(engine, all_reduce.measure(machine, size, name, engine)) for engine in engines])


def best(case: str, found: list[tuple[str, Any]]) -> dict[str, Any]:
    """The faster engine's figure; found: (engine, Result)."""
    rates = {engine: statistics.median(result.rates) for engine, result in found}
    engine, result = max(found, key=lambda pair: rates[pair[0]])
    return {"case": case, "rate": rates[engine], "unit": result.unit, "error": result.relative_error,
            "engine": engine}  # fmt: skip


def opened(args: argparse.Namespace, gpus: int | None) -> Any:
    """Machine of tfbench.micro with so many GPUs, or of all."""
    from tfbench import devices
    from tfbench.config import BenchmarkConfig
    from tfbench.hardware.gpus import probe
    from tfbench.microbench.suite import machine_of

    found = probe()
    used = 0 if args.cpu else gpus or len(found.gpus)
    config = BenchmarkConfig(model="resnet50", gpus=used, cpu_replicas=CPU_DEVICES if args.cpu else 1)
    devices.set_environment(config)
    return machine_of(devices.open_devices(config), found, used, quick=False)


def formats(args: argparse.Namespace) -> tuple[str, ...]:
    """Number formats of the products."""
    return ("fp32",) if args.cpu else ("fp16", "bf16", "tf32")


def messages(cpu: bool) -> list[tuple[str, str, int]]:
    """Case, format and bytes of each message."""
    return [(f"{name} {size} B", name, size) for name in SUMMED for size in (SIZES[:2] if cpu else SIZES)]


def turn(args: argparse.Namespace, side: str) -> list[dict[str, Any]]:
    """What a side measures in a process of its own.

    Raises:
        RuntimeError: it failed or took too long.
    """
    python = args.torch_python if side == "torch" else sys.executable
    from tfbench.microbench import all_reduce

    under_way = json.dumps({size: all_reduce.in_flight(size) for size in SIZES})
    command = [
        python, os.path.abspath(__file__), args.what, f"--side={side}", f"--size={args.size}",
        f"--seconds={args.seconds}", f"--under_way={under_way}", *(["--cpu"] if args.cpu else []),
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{side}: not done after --timeout_s={args.timeout_s:g}") from None
    if done.returncode:
        raise RuntimeError(f"{side}: exit code {done.returncode}: {done.stderr[-1500:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def keep(path: str, rows: list[dict[str, Any]]) -> None:
    """Append rows to a CSV file."""
    columns = ("what", "round", "side", "case", "rate", "unit", "error", "engine")
    new = not os.path.exists(path)
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        if new:
            writer.writeheader()
        writer.writerows(rows)


def table(rows: list[dict[str, Any]], what: str, size: int) -> Iterator[str]:
    """A line for each case that both sides have."""
    from tfbench.microbench.matmul import error_bound

    for case in dict.fromkeys(row["case"] for row in rows):
        of_case = [row for row in rows if row["case"] == case]
        ours, theirs = ([r["rate"] for r in of_case if r["side"] == side] for side in ("tfbench", "torch"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=False)]
        if not ratios:
            continue
        bound = error_bound(case, size) if what == "matmul" else 0.0
        wrong = sorted({row["side"] for row in of_case if not row["error"] <= bound})
        yield (
            f"{case:18} tfbench {statistics.median(ours):10,.4g}, torch {statistics.median(theirs):10,.4g} "
            f"{of_case[0]['unit']}: {statistics.median(ours) / statistics.median(theirs):.3f} x, from "
            f"{min(ratios):.3f} to {max(ratios):.3f}"
            + (f"; WRONG results: {', '.join(wrong)}" if wrong else "")
        )


def main() -> None:
    """Race, or one side's turn of it."""
    args = parse()
    if args.side:
        for row in globals()[f"{args.side}_{args.what}"](args):
            print(json.dumps(row), flush=True)
        return
    rows: list[dict[str, Any]] = []
    problem = ""
    try:
        for number in range(args.rounds):
            for side in SIDES:
                new = [{"what": args.what, "round": number, "side": side, **row} for row in turn(args, side)]
                keep(args.csv, new)
                rows += new
                print(
                    f"round {number} {side}: " + ", ".join(f"{r['case']} {r['rate']:.4g}" for r in new),
                    flush=True,
                )
    except RuntimeError as error:
        problem = str(error)
    print(*table(rows, args.what, args.size), sep="\n", flush=True)
    sys.exit(problem or 0)


if __name__ == "__main__":
    main()
