#!/bin/sh
# Compares every kernel of a component with PyTorch and float64: run.sh JSON
set -e
sam3-tvm diagnose --component box_head --json "$1"
