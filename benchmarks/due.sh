#!/usr/bin/env bash
# What is to be measured next (LOG.md says why), the most useful first, on one or two GPUs.
#
#   benchmarks/due.sh FOLDER [SECONDS]
#
# It ends within SECONDS (default 3600). Each run has its seconds at most and a folder of its own in FOLDER, with
# console.txt and, once it has ended, exit_code. Started again with the same FOLDER it goes on with the runs that
# have no exit_code. Runs of one GPU go side by side on two. `scripts/scaling_study.sh` comes after it.
#
# Exit code: 0 all was run, 1 some run failed, 124 some was not run for want of time.
set -euo pipefail
if [[ $# -eq 0 || $1 == -* || ! ${2:-1} =~ ^[0-9]+$ ]]; then
  echo "usage: $0 FOLDER [SECONDS]; SECONDS is a whole number" >&2
  exit 2
fi
folder=$(realpath --canonicalize-missing "$1") limit_s=${2:-3600}
ROOT=$(realpath "$(dirname "${BASH_SOURCE[0]}")/..")
export ROOT PYTHONPATH=$ROOT${PYTHONPATH:+:$PYTHONPATH}
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
grace_s=15 # that an interrupted training gets to write its row
mkdir -p "$folder"
rm -f "$folder"/*/not_run

run() { # GPUS SECONDS NAME COMMAND…
  local own=$folder/$3 code=0
  mkdir -p "$own"
  if [[ -e $own/exit_code ]]; then return; fi
  if [[ $2 -gt $((limit_s - SECONDS - grace_s)) ]]; then
    touch "$own/not_run"
    return
  fi
  echo "$SECONDS s: $3 on GPU $1"
  (cd "$own" && CUDA_VISIBLE_DEVICES=$1 timeout --kill-after=$grace_s "$2" "${@:4}") >"$own/console.txt" 2>&1 </dev/null || code=$?
  echo "$code" >"$own/exit_code"
  echo "$SECONDS s: $3 ended with $code"
}

side_by_side() { # FUNCTION FUNCTION, each on a GPU of its own where there are two
  "$1" 0 &
  if [[ $gpus -lt 2 ]]; then wait; fi
  "$2" $((gpus > 1)) &
  wait
}

race_resnet50() { # GPU
  run "$1" 200 ceilings python "$ROOT"/benchmarks/pytorch_ceilings.py matmul --rounds=2
  run "$1" 450 race_resnet50 "$ROOT"/benchmarks/race.sh resnet50 1024 3
}

race_bert_large() { # GPU
  run "$1" 450 race_bert_large "$ROOT"/benchmarks/race.sh bert_large 256 3
  run "$1" 300 race_bert_512 "$ROOT"/benchmarks/race.sh bert_large 64 2 --seq_length=512
}

scaling() { # SECONDS NAME flags…
  if [[ $gpus -lt 2 ]]; then return; fi
  run 0,1 "$1" "$2" python "$ROOT"/experiments/scaling.py --gpus=2 --nodiagnose "${@:3}"
}

more_resnet50() { # GPU
  run "$1" 400 xla_1024 python "$ROOT"/experiments/xla.py --model=resnet50 --gpus=1 --per_replica_batch_size=1024
  run "$1" 250 values_resnet50 python "$ROOT"/experiments/values.py --model=resnet50 --gpus=1
  run "$1" 120 bfloat16_resnet50 python -m tfbench.train --model=resnet50 --gpus=1 --precision=mixed_bfloat16
  run "$1" 150 reduce_overhead_resnet50 python "$ROOT"/benchmarks/pytorch_peer.py --model=resnet50 --batch=1024 --compile=reduce-overhead
  run "$1" 550 max_autotune python "$ROOT"/benchmarks/pytorch_peer.py --model=resnet50 --batch=1024 --compile=max-autotune
}

more_bert_large() { # GPU
  run "$1" 250 values_bert_large python "$ROOT"/experiments/values.py --model=bert_large --gpus=1
  run "$1" 120 bfloat16_bert_large python -m tfbench.train --model=bert_large --gpus=1 --precision=mixed_bfloat16
  run "$1" 150 reduce_overhead_bert_large python "$ROOT"/benchmarks/pytorch_peer.py --model=bert_large --batch=256 --compile=reduce-overhead
  run "$1" 300 batch_sizes python "$ROOT"/experiments/batch_size.py --gpus=1 --batches=32,128,512
  run "$1" 300 input_race env ONLY='^make-images$|^resnet-(synthetic$|jpeg|ram)|^input-jpeg$' BUDGET=280 \
    "$ROOT"/benchmarks/input_race.sh images 8192 1
}

side_by_side race_resnet50 race_bert_large
XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true scaling 250 overlap_bert_large --model=bert_large --places=inside
scaling 300 update_bert_large --model=bert_large --places=update --repeats=2
scaling 300 update_resnet50 --model=resnet50 --places=update --repeats=3
side_by_side more_resnet50 more_bert_large
scaling 300 batch_512_bert_large --model=bert_large --places=update --per_replica_batch_size=512
scaling 550 minutes_of_sums --model=bert_large --places=inside,update --steps=400 --repeats=3
code=0
if grep -qxv 0 "$folder"/*/exit_code; then code=1; fi
for name in "$folder"/*/not_run; do
  if [[ -e $name ]]; then
    echo "not run for want of time: $(basename "$(dirname "$name")")"
    code=124
  fi
done
exit $code
