#!/usr/bin/env bash
# How far do 2, 4 and 8 GPUs carry? ResNet-50 and BERT-large; weak and strong scaling; float16 and bfloat16;
# gradients summed between the programs, in the update's and in one; and how fast the GPUs sum. Copy this file
# and edit it.
#
#   ./scripts/scaling_study.sh FOLDER [SECONDS [flags of experiments/scaling.py]]
#
# It ends within SECONDS (default 3600), of which the last are for a run that is under way. Started again with
# the same FOLDER it goes on with what is missing, the most important first. What failed is not tried again,
# unless with --retry=failed. Each model has its table and picture in FOLDER/MODEL, at every end.
#
# Measured on one and two H200s: a run takes 79 to 84 s of ResNet-50 and 75 to 112 s of BERT-large where its
# programs are not compiled yet, 54 and 62 s later. On eight GPUs there are 40 runs of each model, about two and a half
# hours; the first stage is 25 minutes of them.
#
# Exit code: 0 all was run, 124 the time was over, 2 flags refused or no run of a model ended ok.
set -euo pipefail
trap 'exit 130' INT TERM # the run ends first
if [[ $# -eq 0 || $1 == -* || ! ${2:-1} =~ ^[0-9]+$ ]]; then
  echo "usage: $0 FOLDER [SECONDS [flags of experiments/scaling.py]]; SECONDS is a whole number" >&2
  exit 2
fi
folder=$(realpath --canonicalize-missing "$1") limit_s=${2:-3600}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/setup_venv.sh
python=$(venv_python) || exit 2
shift $(($# < 2 ? $# : 2))
grace_s=70 # that an interrupted run gets to write its row, as it cannot while it compiles
least_s=20 # nothing is begun with less
worst=0
models=("resnet50 80" "bert_large 115") # seconds of a run, for the estimate
# Modes, precisions, collectives: each stage holds the one before.
stages=(
  "weak mixed_float16 outside,update"
  "weak,strong mixed_float16 outside,update"
  "weak,strong mixed_float16,mixed_bfloat16 outside,update"
  "weak,strong mixed_float16,mixed_bfloat16 outside,update,inside"
)

in_time() { # COMMAND…, ended when the time is over, and the script with it
  local left_s=$((limit_s - SECONDS - grace_s)) code=0
  if [[ $left_s -ge $least_s ]]; then
    # In the foreground, so that Ctrl-C reaches it; SIGTERM, because jobs in the background ignore SIGINT.
    timeout --foreground --kill-after="$grace_s" "$left_s" "$@" || code=$?
  else
    code=124
  fi
  if [[ $code -eq 124 || $code -eq 137 ]]; then
    echo "The time is over: the same command goes on with what is missing."
    exit 124
  fi
  # 1: some runs, or cases of the micro-benchmark, failed, as the table says; 2: all, and other models go on.
  if [[ $code -gt 2 ]]; then exit "$code"; fi
  if [[ $code -gt worst ]]; then worst=$code; fi
}

scaling() { # MODEL STAGE flag…
  local modes precisions places
  read -r modes precisions places <<<"$2"
  in_time "$python" experiments/scaling.py --model="$1" --modes="$modes" --precisions="$precisions" \
    --places="$places" --point_timeout_s=300 --retry=none "${@:3}" --results_dir="$folder/$1"
}

for each in "${models[@]}"; do
  scaling "${each% *}" "${stages[-1]}" "$@" --plan_s="${each#* }"
  if [[ $worst -eq 2 ]]; then exit 2; fi # refused
done
for stage in "${stages[@]}"; do
  for each in "${models[@]}"; do
    scaling "${each% *}" "$stage" "$@"
  done
  if [[ ! -e $folder/all_reduce.done ]]; then
    in_time "$python" -m tfbench.micro --only=all_reduce --results_dir="$folder/all_reduce"
    touch "$folder/all_reduce.done"
  fi
done
exit $((worst == 2 ? 2 : 0))
