"""Prints the verdict on each output of a report: verdicts.py REPORT."""

import json
import sys
from pathlib import Path

report = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
for case in report["cases"]:
    for output in case["outputs"]:
        print(case["component"], output["name"], output["verdict"], f"r_rms {output['r_rms']:.2f}")
