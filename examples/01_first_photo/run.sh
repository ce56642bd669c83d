#!/bin/sh
# Finds everything that a text means in a photograph: run.sh MODEL OUT
set -e
photo=$(dirname "$0")/../../fixtures/images/cat.png
sam3-tvm segment "$photo" --text cat --model "$1" --out "$2"
