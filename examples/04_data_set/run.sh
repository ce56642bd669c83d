#!/bin/sh
# Annotates a folder of photographs: run.sh MODEL OUT
set -e
here=$(dirname "$0")
sam3-tvm segment "$here/../../fixtures/images" --classes "$here/classes.txt" --model "$1" --out "$2"
python "$here/count.py" "$2/annotations.json"
