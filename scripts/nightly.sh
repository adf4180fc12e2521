#!/usr/bin/env bash
# Has training become slower since the last good night? Copy this file, edit the list, and let cron run it:
#
#   ./scripts/nightly.sh [flags of python -m tfbench.sweep]
#
# Exit code: 0 no regression, or the first night, which only records; 1 a rate that lies below that of the last
# good night with 95 % confidence, a run that did not end ok, or one of the last good night that is not run
# any more (after a change of the list that is meant, remove good.csv); 2 flags refused, no run that ended ok, or
# nothing to compare.
#
# A night without a regression becomes the one to compare with, so many small losses can add up unseen: to
# compare with one fixed night for ever, set TFBENCH_KEEP_GOOD=1.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
trap 'exit 130' INT TERM # the sweep ends its run first
. scripts/setup_venv.sh
python=$(venv_python) || exit 2
results=${TFBENCH_NIGHTLY:-tfbench_results/nightly}
good=$results/good.csv
night=$results/$(date -u +%F) # started again on the same day, it runs only what is missing

precisions=tf32,mixed_float16
if [[ " $* " =~ " --gpus"[=\ ]"0 " ]] || ! has_nvidia_driver; then
  precisions=fp32 # a CPU has no TF32, and emulates half precision
fi
# Four runs of each: from the fourth on an interval holds what the runs before it differ by.
sweep_code=0
"$python" -m tfbench.sweep \
  --sweep="model=resnet50,bert_base precision=$precisions" \
  --gpus=auto --repeats=4 "$@" --results_dir="$night" || sweep_code=$?
if [[ $sweep_code -ge 2 ]]; then exit "$sweep_code"; fi

if [[ -e $good ]]; then
  report_code=0
  "$python" -m tfbench.report "$night" --baseline="$good" --html="$night/report.html" || report_code=$?
  if [[ $report_code -eq 2 ]]; then
    echo "nightly: nothing could be compared; to start anew from tonight: cp $night/runs.csv $good" >&2
  fi
  if [[ $report_code -ne 0 ]]; then exit "$report_code"; fi
fi
if [[ $sweep_code -ne 0 ]]; then exit "$sweep_code"; fi

if [[ ! -e $good ]]; then
  echo "nightly: the first good night, kept as $good"
elif [[ -n ${TFBENCH_KEEP_GOOD:-} ]]; then
  exit 0
fi
cp "$night/runs.csv" "$good.new"
mv "$good.new" "$good" # whole or not at all
