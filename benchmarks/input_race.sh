#!/usr/bin/env bash
# How much of the rate with synthetic input is left with real input, and what the input alone would give.
#   benchmarks/input_race.sh FOLDER [IMAGES] [GPUS]
# Makes the data in FOLDER/data (kept for the next time; 8,192 images, all kinds together about 4 GB), then reads each
# kind alone and trains on it: JPEG of ImageNet's sizes (jpeg), the same from memory (ram), copies of 256 pixels as
# uncompressed records (raw) and as JPEG (jpeg256), and token records (tokens). Rows go to FOLDER/runs.csv and input.csv
# as they come, output to FOLDER/*.txt; the table of input_table.py comes last, also where the script is stopped. GPUS 0
# is a dry run of tiny models on the CPU. Two variables: ONLY, a regular expression, picks steps
# (ONLY='^make|^resnet|^input' benchmarks/input_race.sh …); BUDGET, in seconds, leaves out what does not begin within
# them and ends what has not ended 20 s later. What matters most is run first.
set -u
folder=${1:?the folder for data and rows} images=${2:-8192} gpus=${3:-1}
here=$(cd "$(dirname "$0")" && pwd)
data=$folder/data only=${ONLY:-.} budget=${BUDGET:-3600} vocabulary=() failed=0
mkdir -p "$data"
common=(--gpus="$gpus" --results_dir="$folder" --target_interval_percent=0)
# With real data as with synthetic data by default: what a card at its power limit reaches depends on the weights.
like=(--lr_warmup_steps=10000)
if [ "$gpus" = 0 ]; then
    image=(--model=resnet_tiny --image_size=64 --per_replica_batch_size=16)
    text=(--model=bert_tiny --seq_length=128 --per_replica_batch_size=16)
    training=(--warmup_steps=3 --steps=8 --windows=4) reading=(--warmup_steps=2 --windows=3 --seconds=0.5)
    # The tiny model knows few tokens.
    { printf '[%s]\n' PAD UNK CLS SEP MASK && printf '%s\n' {a..z} '##'{a..z}; } >"$data/vocab.txt"
    vocabulary=(--vocab="$data/vocab.txt")
else
    image=(--model=resnet50 --image_size=224 --per_replica_batch_size=256 --precision=mixed_float16)
    text=(--model=bert_base --seq_length=128 --per_replica_batch_size=256 --precision=mixed_float16)
    # The steps before fill the cache. A window is two calls of ten steps.
    training=(--warmup_steps=50 --steps=200 --windows=10) reading=(--warmup_steps=10 --windows=5 --seconds=2.5)
fi

step() { # name, seconds, command …
    local name=$1 limit=$2 began=$SECONDS code=0
    shift 2
    [[ $name =~ $only ]] || return 0
    local left=$((budget - SECONDS))
    ((left > 0)) || { echo "$name: left out, BUDGET=$budget s are over" && failed=1 && return 0; }
    ((limit < left + 20)) || limit=$((left + 20))
    timeout -k 5 "$limit" "$@" >"$folder/$name.txt" 2>&1 || code=$?
    ((code == 0)) || failed=1
    echo "$name: exit code $code, $((SECONDS - began)) s"
}
make() { step "make-$1" 300 python -m tfbench.make_data --out="$data/$1" "${@:2}"; }
train() { step "$1" 180 python -m tfbench.train "${common[@]}" "${like[@]}" "${training[@]}" --tensorboard=false --tag="$1" "${@:2}"; }
alone() { step "input-$1" 90 python -m tfbench.input "${common[@]}" "${reading[@]}" --tag="input-$1" "${@:2}"; }

finish() {
    PYTHONPATH="$here/..${PYTHONPATH:+:$PYTHONPATH}" python "$here/input_table.py" "$folder"
    exit "$failed"
}
trap finish EXIT
trap 'failed=1; exit' INT TERM

make images --kind=images --num="$images" --shards=32
make raw --kind=resized --encoding=raw --source="tfrecord:$data/images/train-*"
# The standard library's sources are text that every machine has.
sources=$(python -c 'import sysconfig; print(sysconfig.get_paths()["stdlib"])')
make tokens --kind=tokens --source="$sources/*.py" --seq_length=128 --shards=8 "${vocabulary[@]}"

both() { # kind, flags of its data …
    alone "$1" "${image[@]}" "${@:2}"
    train "resnet-$1" "${image[@]}" "${@:2}"
}
train resnet-synthetic "${image[@]}"
both jpeg --data="tfrecord:$data/images/train-*"
train resnet-ram "${image[@]}" --data="tfrecord:$data/images/train-*" --cache=ram
train resnet-raw "${image[@]}" --data="tfrecord:$data/raw/train-*"
train resnet-synthetic-again "${image[@]}"
train bert-synthetic "${text[@]}"
train bert-tokens "${text[@]}" --data="tokens:$data/tokens"
alone raw "${image[@]}" --data="tfrecord:$data/raw/train-*"
alone ram "${image[@]}" --data="tfrecord:$data/images/train-*" --cache=ram
alone tokens "${text[@]}" --data="tokens:$data/tokens"
make jpeg256 --kind=resized --encoding=jpeg --source="tfrecord:$data/images/train-*"
both jpeg256 --data="tfrecord:$data/jpeg256/train-*"
