#!/bin/sh
# Verifies a component and prints its verdicts: run.sh REPORT
set -e
sam3-tvm verify --component box_head --strategy real --report "$1"
python "$(dirname "$0")/verdicts.py" "$1/verification_report.json"
